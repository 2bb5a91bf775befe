"""What an engine's refusal means, and what to do about it."""

from __future__ import annotations

from ringfence.sandbox.docker.engine import EngineError
from ringfence.sandbox.types import SandboxError

_OVERLAY_FIX = "put the data directory on ext4, xfs, btrfs or tmpfs (an overlay can't lie on another), Linux 5.12 or newer"


def refusal(error: EngineError, image: str, runtime: str) -> SandboxError:
    """The user's line for an engine that refuses to make or start a container."""
    text = str(error)
    lower = text.lower()
    if error.not_found and "image" in lower:
        return no_image(image)
    if "unknown runtime" in lower or "invalid runtime" in lower:
        return SandboxError(
            f"the docker engine has no runtime `{runtime}`; install it and add it to the engine's `runtimes`, or write `runtime: runc`"
        )
    if "bind source path does not exist" in lower:
        return SandboxError(
            f"the docker engine does not see this kernel's files ({text}); run both on one host, and the kernel outside of containers"
        )
    if "mount" in lower and "volume" in lower:
        return SandboxError(f"the sandbox's wall `overlay` can't be raised: {text}; {_OVERLAY_FIX}")
    if "python3" in lower:
        return SandboxError(
            f"the image `{image}` has no `python3`, which its first process needs; build one on top of `ringfence image build`"
        )
    return SandboxError(
        f"the docker engine refuses the sandbox: {text}; see `ringfence doctor` and the engine's log"
    )


def no_image(image: str) -> SandboxError:
    """The engine hasn't got the image."""
    return SandboxError(
        f"the image `{image}` is not on the docker engine; run `ringfence image build` and put the digest it prints "
        "into the kernel file as `sandbox.docker.image`"
    )
