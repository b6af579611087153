//! Reading from a file descriptor straight into a buffer that grows.

use std::io;
use std::os::fd::AsFd;

use bytes::BytesMut;

/// Reads once, with room for at least so many bytes; how many came, 0 at the end.
#[allow(unsafe_code, reason = "what was read into is told to the buffer")]
pub(crate) fn read_into(buffer: &mut BytesMut, room: usize, from: impl AsFd) -> io::Result<usize> {
    buffer.reserve(room);
    let read = loop {
        match rustix::io::read(&from, buffer.spare_capacity_mut()) {
            Ok((read, _)) => break read.len(),
            Err(rustix::io::Errno::INTR) => {}
            Err(error) => return Err(error.into()),
        }
    };
    // SAFETY: so many bytes after those there were have just been written, within the capacity.
    unsafe { buffer.set_len(buffer.len() + read) };
    Ok(read)
}
