//! NVIDIA's management library as a source.
