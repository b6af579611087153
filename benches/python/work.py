"""Work for workers: return the argument. In its own module, so that all peers can import it."""

from gpu_dispatch import BaseWorker


def echo(data):
    return data


class EchoWorker(BaseWorker):
    def setup(self, gpu_id, seed, **kwargs):
        pass

    def process(self, data):
        return data

    def cleanup(self):
        pass
