# SPDX-License-Identifier: Apache-2.0
"""Code shared by plug-ins: the exchange of KV between engines, and observers of the sanitizer.

KV is located by the addresses of the engine's tensors, so no module of this package imports an
engine.
"""
