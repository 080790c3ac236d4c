"""SCOUT for DeepSpeed 0.19: switched on by the block "scout" of the DeepSpeed JSON.

Importing this package is enough, in any order: engines that are built later and whose configuration
says `"scout": {"enabled": true}` get a session, as `engine.scout`. Nothing else happens.
"""

from __future__ import annotations

from scout_deepspeed.arming import arm

__all__ = ["arm"]

arm()
