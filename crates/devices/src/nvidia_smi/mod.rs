//! What `nvidia-smi` prints, in each of its forms, and the tool as a source.
