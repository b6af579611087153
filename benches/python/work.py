"""Work that is given to workers: nothing, and giving back an array. In a module, so that every peer can import it."""

from gpu_dispatch import BaseWorker


def same(data):
    return data


class Same(BaseWorker):
    def setup(self, gpu_id, seed, **kwargs):
        pass

    def process(self, data):
        return data

    def cleanup(self):
        pass
