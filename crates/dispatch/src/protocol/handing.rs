//! Handing memory over a socket, with the first bytes that are said.

use std::io::{self, IoSlice, IoSliceMut};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use rustix::net::{
    RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, SendAncillaryBuffer, SendAncillaryMessage, SendFlags,
    recvmsg, sendmsg,
};

/// Sends bytes, and one or two file descriptors with the first of them. How many bytes were sent.
pub fn send_with(socket: impl AsFd, bytes: &[u8], handed: &[BorrowedFd<'_>]) -> io::Result<usize> {
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(2))];
    let mut message = SendAncillaryBuffer::new(&mut space);
    message.push(SendAncillaryMessage::ScmRights(handed));
    Ok(sendmsg(socket, &[IoSlice::new(bytes)], &mut message, SendFlags::NOSIGNAL)?)
}

/// Reads bytes, and the file descriptors that came with them, two at most. Further ones are closed.
pub fn receive(socket: impl AsFd, bytes: &mut [u8]) -> io::Result<(usize, [Option<OwnedFd>; 2])> {
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(4))];
    let mut message = RecvAncillaryBuffer::new(&mut space);
    let received = recvmsg(socket, &mut [IoSliceMut::new(bytes)], &mut message, RecvFlags::CMSG_CLOEXEC)?;
    let handed = message.drain().filter_map(|message| match message {
        RecvAncillaryMessage::ScmRights(handed) => Some(handed),
        _ => None,
    });
    let mut handed = handed.flatten();
    Ok((received.bytes, [handed.next(), handed.next()]))
}
