# SPDX-License-Identifier: Apache-2.0
"""What the plug-ins for different engines share to exchange KV.

The plug-ins locate KV by the addresses of an engine's tensors. Neither module imports an engine.
"""
