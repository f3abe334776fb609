# SPDX-License-Identifier: Apache-2.0
"""The envelope in which routers send hints: the format of vLLM's `kv_hints` and Dynamo's `kv_hint`.

{"protocol_version": "0.1", "message_id": "m1", "actions": [
    {"action_id": "a1", "action_type": "kv.pin", "action_version": "1.0", "payload": {"ttl_s": 30}}]}
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from typing import Any

from kvcache.checks import instance, listed, shown, text
from kvcache.hints.vocabulary import INTENTS, Hint, Receipt

PROTOCOL_VERSION, ACTION_VERSION = "0.1", "1.0"
MAX_ACTIONS = 32
_PREFIX = "kv."
_ENVELOPE = {"protocol_version", "message_id", "actions"}
_ACTION = {"action_id", "action_type", "action_version", "payload"}
_PAYLOAD = {field.name for field in fields(Hint)} - {"intent", "action_id"}


def hints_of_envelope(envelope: Mapping[str, Any]) -> list[Hint | Receipt]:
    """Return the hints of an envelope, in order.

    An envelope may contain actions of other vocabularies, such as Dynamo's `kv.fetch`. These
    actions, and actions with an invalid payload, are refused individually. All other actions are
    carried out.

    Args:
        envelope: The envelope, as parsed JSON.

    Returns:
        One entry per action: its hint, or a receipt that refuses the action.

    Raises:
        TypeError, ValueError: The envelope itself is malformed.

    Example:
        >>> action = {"action_id": "a", "action_type": "kv.fetch", "action_version": "1.0", "payload": {}}
        >>> envelope = {"protocol_version": "0.1", "message_id": "m", "actions": [action]}
        >>> hints_of_envelope(envelope)[0].status
        'refused'
    """
    instance(envelope, Mapping, "kv_hints")
    _check_names(envelope, _ENVELOPE, "kv_hints")
    if envelope["protocol_version"] != PROTOCOL_VERSION:
        raise ValueError(
            f"kv_hints.protocol_version is {shown(envelope['protocol_version'])}: expected "
            f"{PROTOCOL_VERSION!r}"
        )
    text(envelope["message_id"], "kv_hints.message_id")
    actions = envelope["actions"]
    if isinstance(actions, str | bytes | Mapping):
        raise TypeError(f"kv_hints.actions is {shown(actions)}: expected a list of actions")
    actions = listed(actions, "kv_hints.actions", "a list of actions")
    if len(actions) > MAX_ACTIONS:
        raise ValueError(
            f"kv_hints.actions has {len(actions)} entries: expected at most {MAX_ACTIONS}"
        )
    for i, action in enumerate(actions):
        _check_action(action, f"kv_hints.actions[{i}]")
    ids = [action["action_id"] for action in actions]
    if len(set(ids)) < len(ids):
        twice = next(each for each in ids if ids.count(each) > 1)
        raise ValueError(
            f"kv_hints.actions has {shown(twice)} twice as action_id: expected each ID once"
        )
    return [_hint_of(action) for action in actions]


def _check_names(value: Mapping[str, Any], names: set[str], what: str) -> None:
    for name in sorted(names - value.keys()):
        raise ValueError(f"{what}.{name} is missing: expected {', '.join(sorted(names))}")
    for name in value.keys() - names:
        raise ValueError(f"{what} has {shown(name)}: expected {', '.join(sorted(names))}")


def _check_action(action: object, what: str) -> None:
    instance(action, Mapping, what)
    _check_names(action, _ACTION, what)
    for name in ("action_id", "action_type", "action_version"):
        text(action[name], f"{what}.{name}")
    instance(action["payload"], Mapping, f"{what}.payload")


def _hint_of(action: Mapping[str, Any]) -> Hint | Receipt:
    try:
        return _known_hint(action)
    except (TypeError, ValueError) as error:
        return Receipt(
            intent=action["action_type"],
            action_id=action["action_id"],
            status="refused",
            reason=str(error),
        )


def _known_hint(action: Mapping[str, Any]) -> Hint:
    kind, version, payload = action["action_type"], action["action_version"], action["payload"]
    intent = kind.removeprefix(_PREFIX)
    if not kind.startswith(_PREFIX) or intent not in INTENTS:
        names = ", ".join(_PREFIX + each for each in INTENTS)
        raise ValueError(f"action_type is {shown(kind)}: expected one of {names}")
    if version != ACTION_VERSION:
        raise ValueError(f"action_version is {shown(version)}: expected {ACTION_VERSION!r}")
    for name in payload:
        if name not in _PAYLOAD:
            raise ValueError(
                f"payload has {shown(name)}: expected one of {', '.join(sorted(_PAYLOAD))}"
            )
    given = {name: value for name, value in payload.items() if value is not None}
    return Hint(intent=intent, action_id=action["action_id"], **given)
