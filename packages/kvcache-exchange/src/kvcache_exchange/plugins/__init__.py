# SPDX-License-Identifier: Apache-2.0
"""Code shared by the plug-ins that exchange KV between engines.

KV is located by the addresses of the engine's tensors, so no module of this package imports an
engine.
"""
