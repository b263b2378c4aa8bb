"""moto's S3 on loopback with one bucket, as a program: prints its address, ends with its standard input."""

import logging
import sys
import urllib.request

from moto.server import ThreadedMotoServer

if __name__ == "__main__":
    logging.getLogger("werkzeug").disabled = True
    server = ThreadedMotoServer("127.0.0.1", 0, verbose=False)
    server.start()
    address = "http://{}:{}".format(*server.get_host_and_port())
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    opener.open(urllib.request.Request(address + "/bucket", method="PUT"))
    sys.stdout.write(f"{address}\n")
    sys.stdout.flush()
    sys.stdin.read()
    server.stop()
