"""Create a virtual environment with uv; on Debian, first install the package that `venv` needs."""

import os
import shutil
import subprocess
import sys
import venv


def has_ensurepip() -> bool:
    """Whether ensurepip is installed, which Debian ships in a separate package."""
    try:
        import ensurepip  # noqa: F401
    except ImportError:
        return False
    return True


def main() -> int:
    """Create the environment named on the command line."""
    target = sys.argv[1]
    package = f"python{sys.version_info.major}.{sys.version_info.minor}-venv"
    if not has_ensurepip():
        if os.geteuid() != 0 or shutil.which("apt-get") is None:
            print(
                f"moored: {sys.executable} cannot create virtual environments; "
                f"install {package} first (as root: apt-get install {package})",
                file=sys.stderr,
            )
            return 2
        print(f"installing {package} (on Debian, venv is a separate package)", flush=True)
        environment = {**os.environ, "DEBIAN_FRONTEND": "noninteractive"}
        subprocess.run(["apt-get", "update", "-qq"], check=True, env=environment)
        subprocess.run(["apt-get", "install", "-y", "-qq", package], check=True, env=environment)
        # In a new process: the running interpreter may not find the new ensurepip.
        subprocess.run([sys.executable, "-m", "venv", target], check=True)
    else:
        venv.create(target, with_pip=True, symlinks=True)
    # Where uv is not to be had, pip will do.
    install = [f"{target}/bin/python", "-m", "pip", "install", "-q", "-c", "constraints.txt", "uv"]
    subprocess.run(install)
    return 0


if __name__ == "__main__":
    sys.exit(main())
