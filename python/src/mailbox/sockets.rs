//! What an event loop watches for us, behind one descriptor: a bell that other threads ring, and the sockets that futures wait
//! for which are polled in the loop's thread.

use std::collections::HashMap;
use std::io;
use std::mem::MaybeUninit;
use std::os::fd::{AsRawFd as _, BorrowedFd, OwnedFd, RawFd};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::task::Waker;

use gpupool_client::watch::{Ready, Watch};
use rustix::event::epoll::{self, CreateFlags, Event, EventData, EventFlags};
use rustix::event::{EventfdFlags, Timespec, eventfd};
use rustix::io::Errno;

/// Not the number of any socket.
const BELL: u64 = u64::MAX;
/// Sockets that are ready and told of at once; the others are told of right after.
const AT_ONCE: usize = 64;

#[derive(Debug)]
pub(super) struct Sockets {
    /// Readable while the bell rings or a socket is ready.
    epoll: OwnedFd,
    bell: OwnedFd,
    waited_for: Mutex<HashMap<RawFd, Waited>>,
}

/// Until a socket is ready for one of these.
#[derive(Debug)]
struct Waited {
    flags: EventFlags,
    waker: Waker,
}

impl Sockets {
    pub fn new() -> io::Result<Self> {
        let epoll = epoll::create(CreateFlags::CLOEXEC)?;
        let bell = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?;
        epoll::add(&epoll, &bell, EventData::new_u64(BELL), EventFlags::IN)?;
        Ok(Self { epoll, bell, waited_for: Mutex::default() })
    }

    /// What the loop has to watch.
    pub fn number(&self) -> RawFd {
        self.epoll.as_raw_fd()
    }

    /// Has the loop call us.
    pub fn ring(&self) {
        // A counter of 64 bits is not full.
        let _ = rustix::io::write(&self.bell, &1_u64.to_ne_bytes());
    }

    /// Stops the bell, and wakes those whose sockets are ready.
    pub fn heard(&self) {
        let mut events = [MaybeUninit::<Event>::uninit(); AT_ONCE];
        let at_once = Timespec { tv_sec: 0, tv_nsec: 0 };
        // Where it fails, the loop calls again.
        let Ok((events, _)) = epoll::wait(&self.epoll, &mut events, Some(&at_once)) else { return };
        for event in events {
            let number = event.data.u64();
            if number == BELL {
                let _ = rustix::io::read(&self.bell, &mut [0; 8]);
                continue;
            }
            let waited = RawFd::try_from(number).ok().and_then(|socket| self.waited_for().remove(&socket));
            if let Some(waited) = waited {
                waited.waker.wake();
            }
        }
    }

    fn waited_for(&self) -> MutexGuard<'_, HashMap<RawFd, Waited>> {
        self.waited_for.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Watch for Sockets {
    fn watch(&self, socket: BorrowedFd<'_>, ready: Ready, waker: &Waker) -> io::Result<()> {
        let number = socket.as_raw_fd();
        let mut waited_for = self.waited_for();
        let before = waited_for.remove(&number).map_or(EventFlags::empty(), |waited| waited.flags);
        let flags = before | flags_of(ready);
        let (data, once) = (EventData::new_u64(u64::from(number.unsigned_abs())), flags | EventFlags::ONESHOT);
        match epoll::modify(&self.epoll, socket, data, once) {
            Err(Errno::NOENT) => epoll::add(&self.epoll, socket, data, once)?,
            modified => modified?,
        }
        waited_for.insert(number, Waited { flags, waker: waker.clone() });
        Ok(())
    }

    fn still_waits(&self, socket: BorrowedFd<'_>, ready: Ready, waker: &Waker) -> bool {
        match self.waited_for().get_mut(&socket.as_raw_fd()) {
            Some(waited) if waited.flags.contains(flags_of(ready)) => {
                waited.waker.clone_from(waker);
                true
            }
            _ => false,
        }
    }

    fn forget(&self, socket: BorrowedFd<'_>) {
        self.waited_for().remove(&socket.as_raw_fd());
        // A copy of it in a forked child would keep it here; where it is not, that is as well.
        let _ = epoll::delete(&self.epoll, socket);
    }
}

fn flags_of(ready: Ready) -> EventFlags {
    match ready {
        Ready::Read => EventFlags::IN | EventFlags::RDHUP,
        Ready::Write => EventFlags::OUT,
    }
}
