# SPDX-License-Identifier: Apache-2.0
"""Parts that the plug-ins for different engines share to exchange KV.

KV is located by the addresses of an engine's tensors. No module of this package imports an engine.
"""
