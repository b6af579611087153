//! What starter and keeper say to each other: first the orders on the keeper's command line, then one small packet per
//! message over a socket pair. Environment, directory and standard streams come by inheritance.

use std::ffi::{OsStr, OsString};
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd, RawFd};

use rustix::io::{Errno, retry_on_intr};
use rustix::net::{RecvFlags, SendFlags, recv, send};

use crate::process::ProcessId;

/// Which process group the job runs in.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Placement {
    OwnGroup,
    /// That of the starter, whose number this is.
    GroupOfStarter(i32),
}

/// A keeper's orders.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Order {
    /// The file descriptor of the socket to the starter.
    pub(crate) link: RawFd,
    pub(crate) starter: i32,
    pub(crate) placement: Placement,
    pub(crate) program: OsString,
    pub(crate) arguments: Vec<OsString>,
}

impl Order {
    /// The arguments after the hidden one.
    pub(crate) fn to_arguments(&self) -> Vec<OsString> {
        let group = match self.placement {
            Placement::OwnGroup => 0,
            Placement::GroupOfStarter(group) => group,
        };
        let numbers = [self.link, self.starter, group].map(|number| OsString::from(number.to_string()));
        numbers.into_iter().chain([self.program.clone()]).chain(self.arguments.iter().cloned()).collect()
    }

    /// Reads them back; `None` if they are not from us.
    pub(crate) fn parse(arguments: &[OsString]) -> Option<Self> {
        let [link, starter, group, program, arguments @ ..] = arguments else {
            return None;
        };
        let number = |text: &OsStr| text.to_str()?.parse::<i32>().ok().filter(|&number| number >= 0);
        let link = number(link).filter(|&link| link > 2)?;
        let placement = match number(group)? {
            0 => Placement::OwnGroup,
            group => Placement::GroupOfStarter(group),
        };
        let (program, arguments) = (program.clone(), arguments.to_vec());
        Some(Self { link, starter: number(starter)?, placement, program, arguments })
    }
}

/// From the starter.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum ToKeeper {
    /// Let the job's program run.
    Start,
    /// Pass this signal on to the job.
    Signal(i32),
    /// Kill the job and all it started.
    Kill,
}

/// To the starter.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum FromKeeper {
    /// The job's process exists and waits for [`ToKeeper::Start`].
    Prepared(ProcessId),
    /// The program runs.
    Started,
    /// The program could not be run, for this system error; nothing is left.
    ExecFailed(i32),
    /// The job was stopped by this signal.
    Stopped(i32),
    /// The job runs again.
    Continued,
    /// The job exited; `stuck` of its processes could not be killed so far.
    Exited { code: i32, stuck: u32 },
    /// A signal ended the job.
    Signalled { signal: i32, stuck: u32 },
}

/// One end of the socket pair.
#[derive(Debug)]
pub(crate) struct Link(OwnedFd);

const PACKET: usize = 16;

impl Link {
    pub(crate) fn new(socket: OwnedFd) -> Self {
        Self(socket)
    }

    pub(crate) fn send(&self, message: impl Into<Packet>) -> io::Result<()> {
        let Packet(bytes) = message.into();
        // No SIGPIPE: the other side being gone is an ordinary answer here.
        retry_on_intr(|| send(&self.0, &bytes, SendFlags::NOSIGNAL))?;
        Ok(())
    }

    /// The next message, waiting for it or not (`WouldBlock`); `UnexpectedEof` when the other side is gone.
    pub(crate) fn receive<M: TryFrom<Packet>>(&self, flags: RecvFlags) -> io::Result<M> {
        let mut bytes = [0_u8; PACKET];
        let length = loop {
            match recv(&self.0, &mut bytes, flags) {
                Ok((length, _)) => break length,
                // Reset: the other side ended with words of ours unread. Told once, before what it had said itself.
                Err(Errno::INTR | Errno::CONNRESET) => {}
                Err(error) => return Err(error.into()),
            }
        };
        match length {
            0 => Err(io::ErrorKind::UnexpectedEof.into()),
            PACKET => M::try_from(Packet(bytes)).map_err(|_| io::Error::from(io::ErrorKind::InvalidData)),
            _ => Err(io::ErrorKind::InvalidData.into()),
        }
    }
}

impl AsFd for Link {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}

/// A message as bytes: a kind, a number, a wide number.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Packet([u8; PACKET]);

impl Packet {
    fn new(kind: u32, number: i32, wide: u64) -> Self {
        let mut bytes = [0; PACKET];
        bytes[..4].copy_from_slice(&kind.to_le_bytes());
        bytes[4..8].copy_from_slice(&number.to_le_bytes());
        bytes[8..].copy_from_slice(&wide.to_le_bytes());
        Self(bytes)
    }

    fn split(self) -> (u32, i32, u64) {
        let part =
            |from: usize| u32::from_le_bytes([self.0[from], self.0[from + 1], self.0[from + 2], self.0[from + 3]]);
        (part(0), part(4).cast_signed(), u64::from(part(8)) | u64::from(part(12)) << 32)
    }
}

impl From<ToKeeper> for Packet {
    fn from(message: ToKeeper) -> Self {
        match message {
            ToKeeper::Start => Self::new(1, 0, 0),
            ToKeeper::Signal(signal) => Self::new(2, signal, 0),
            ToKeeper::Kill => Self::new(3, 0, 0),
        }
    }
}

impl TryFrom<Packet> for ToKeeper {
    type Error = ();
    fn try_from(packet: Packet) -> Result<Self, ()> {
        match packet.split() {
            (1, ..) => Ok(Self::Start),
            (2, signal, _) => Ok(Self::Signal(signal)),
            (3, ..) => Ok(Self::Kill),
            _ => Err(()),
        }
    }
}

impl From<FromKeeper> for Packet {
    fn from(message: FromKeeper) -> Self {
        match message {
            FromKeeper::Prepared(id) => Self::new(11, id.pid.cast_signed(), id.started),
            FromKeeper::Started => Self::new(12, 0, 0),
            FromKeeper::ExecFailed(errno) => Self::new(13, errno, 0),
            FromKeeper::Stopped(signal) => Self::new(14, signal, 0),
            FromKeeper::Continued => Self::new(15, 0, 0),
            FromKeeper::Exited { code, stuck } => Self::new(16, code, stuck.into()),
            FromKeeper::Signalled { signal, stuck } => Self::new(17, signal, stuck.into()),
        }
    }
}

impl TryFrom<Packet> for FromKeeper {
    type Error = ();
    fn try_from(packet: Packet) -> Result<Self, ()> {
        let (kind, number, wide) = packet.split();
        let stuck = u32::try_from(wide).unwrap_or(u32::MAX);
        Ok(match kind {
            11 => Self::Prepared(ProcessId { pid: number.cast_unsigned(), started: wide }),
            12 => Self::Started,
            13 => Self::ExecFailed(number),
            14 => Self::Stopped(number),
            15 => Self::Continued,
            16 => Self::Exited { code: number, stuck },
            17 => Self::Signalled { signal: number, stuck },
            _ => return Err(()),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_message_survives_the_wire() {
        use FromKeeper::*;
        let id = ProcessId { pid: 4_194_303, started: u64::MAX - 7 };
        let all = [
            Prepared(id),
            Started,
            ExecFailed(2),
            Stopped(20),
            Continued,
            Exited { code: 255, stuck: 3 },
            Signalled { signal: 9, stuck: 0 },
        ];
        for message in all {
            assert_eq!(FromKeeper::try_from(Packet::from(message)), Ok(message));
        }
        for message in [ToKeeper::Start, ToKeeper::Signal(15), ToKeeper::Kill] {
            assert_eq!(ToKeeper::try_from(Packet::from(message)), Ok(message));
            assert!(FromKeeper::try_from(Packet::from(message)).is_err());
        }
    }

    #[test]
    fn orders_survive_the_command_line_and_others_are_refused() {
        for placement in [Placement::OwnGroup, Placement::GroupOfStarter(77)] {
            let arguments = vec!["-c".into(), "exit 3".into()];
            let order = Order { link: 9, starter: 12, placement, program: "sh".into(), arguments };
            assert_eq!(Order::parse(&order.to_arguments()), Some(order));
        }
        for wrong in [&["9", "1"][..], &[], &["x", "1", "0", "sh"], &["1", "1", "0", "sh"], &["9", "-1", "0", "sh"]] {
            let wrong: Vec<OsString> = wrong.iter().map(OsString::from).collect();
            assert_eq!(Order::parse(&wrong), None, "{wrong:?}");
        }
    }
}
