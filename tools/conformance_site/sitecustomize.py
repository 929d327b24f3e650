"""Put Moored's pools into psycopg_pool at the start of every Python of the second run."""

import os
import sys
import traceback

if os.environ.get("CONFORMANCE_POOL") == "moored":
    try:
        from moored.reservoir.psycopg_pool import install

        install()
    except BaseException:
        traceback.print_exc()
        sys.stderr.flush()
        os._exit(70)  # an exception would only be printed, and psycopg_pool's own pools be used
