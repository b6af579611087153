//! Messages between starter and supervisor: first the supervisor's command line, then one small packet per message over
//! a socket pair. Environment, directory and standard streams are inherited.

use std::ffi::{OsStr, OsString};
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd, RawFd};

use rustix::io::{Errno, retry_on_intr};
use rustix::net::{RecvFlags, SendFlags, recv, send};

use crate::process::ProcessId;

/// Process group in which the job runs.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum JobProcessGroup {
    Own,
    /// The group of the starter, with its number.
    OfStarter(i32),
}

/// Arguments of a supervisor.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct SupervisorArguments {
    /// File descriptor of the socket to the starter.
    pub(crate) socket: RawFd,
    pub(crate) starter: i32,
    pub(crate) process_group: JobProcessGroup,
    pub(crate) program: OsString,
    pub(crate) arguments: Vec<OsString>,
}

impl SupervisorArguments {
    /// Formats the arguments that follow the hidden one.
    pub(crate) fn to_arguments(&self) -> Vec<OsString> {
        let group = match self.process_group {
            JobProcessGroup::Own => 0,
            JobProcessGroup::OfStarter(group) => group,
        };
        let numbers = [self.socket, self.starter, group].map(|number| OsString::from(number.to_string()));
        numbers.into_iter().chain([self.program.clone()]).chain(self.arguments.iter().cloned()).collect()
    }

    /// Parses the arguments; `None` if they are invalid.
    pub(crate) fn parse(arguments: &[OsString]) -> Option<Self> {
        let [socket, starter, group, program, arguments @ ..] = arguments else {
            return None;
        };
        let number = |text: &OsStr| text.to_str()?.parse::<i32>().ok().filter(|&number| number >= 0);
        let socket = number(socket).filter(|&socket| socket > 2)?;
        let process_group = match number(group)? {
            0 => JobProcessGroup::Own,
            group => JobProcessGroup::OfStarter(group),
        };
        let (program, arguments) = (program.clone(), arguments.to_vec());
        Some(Self { socket, starter: number(starter)?, process_group, program, arguments })
    }
}

/// Command from the starter.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum SupervisorCommand {
    /// Run the job's program.
    Start,
    /// Forward this signal to the job.
    Signal(i32),
    /// Kill every process of the job.
    Kill,
}

/// Event for the starter.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum SupervisorEvent {
    /// The job's process exists and waits for [`SupervisorCommand::Start`].
    Prepared(ProcessId),
    /// The program runs.
    Started,
    /// The program could not be executed because of this system error; no process is left.
    ExecFailed(i32),
    /// The job was stopped by this signal.
    Stopped(i32),
    /// The job runs again.
    Continued,
    /// The job exited; `stuck` of its processes could not be killed so far.
    Exited { code: i32, stuck: u32 },
    /// The job was killed by a signal.
    Signalled { signal: i32, stuck: u32 },
}

/// One end of the socket pair.
#[derive(Debug)]
pub(crate) struct SupervisorSocket(OwnedFd);

const PACKET_LENGTH: usize = 16;

impl SupervisorSocket {
    pub(crate) fn new(socket: OwnedFd) -> Self {
        Self(socket)
    }

    pub(crate) fn send(&self, message: impl Into<MessagePacket>) -> io::Result<()> {
        let MessagePacket(bytes) = message.into();
        // No SIGPIPE: a closed peer is an ordinary result here.
        retry_on_intr(|| send(&self.0, &bytes, SendFlags::NOSIGNAL))?;
        Ok(())
    }

    /// Returns the next message, waiting for it or not (`WouldBlock`); `UnexpectedEof` if the peer is gone.
    pub(crate) fn receive<M: TryFrom<MessagePacket>>(&self, flags: RecvFlags) -> io::Result<M> {
        let mut bytes = [0_u8; PACKET_LENGTH];
        let length = loop {
            match recv(&self.0, &mut bytes, flags) {
                Ok((length, _)) => break length,
                // Reset: the peer exited without reading all our messages. Reported once, before its own messages.
                Err(Errno::INTR | Errno::CONNRESET) => {}
                Err(error) => return Err(error.into()),
            }
        };
        match length {
            0 => Err(io::ErrorKind::UnexpectedEof.into()),
            PACKET_LENGTH => M::try_from(MessagePacket(bytes)).map_err(|_| io::Error::from(io::ErrorKind::InvalidData)),
            _ => Err(io::ErrorKind::InvalidData.into()),
        }
    }
}

impl AsFd for SupervisorSocket {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}

/// A message as bytes: a kind, a number, a wide number.
#[derive(Debug, Clone, Copy)]
pub(crate) struct MessagePacket([u8; PACKET_LENGTH]);

impl MessagePacket {
    fn new(kind: u32, number: i32, wide: u64) -> Self {
        let mut bytes = [0; PACKET_LENGTH];
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

impl From<SupervisorCommand> for MessagePacket {
    fn from(message: SupervisorCommand) -> Self {
        match message {
            SupervisorCommand::Start => Self::new(1, 0, 0),
            SupervisorCommand::Signal(signal) => Self::new(2, signal, 0),
            SupervisorCommand::Kill => Self::new(3, 0, 0),
        }
    }
}

impl TryFrom<MessagePacket> for SupervisorCommand {
    type Error = ();
    fn try_from(packet: MessagePacket) -> Result<Self, ()> {
        match packet.split() {
            (1, ..) => Ok(Self::Start),
            (2, signal, _) => Ok(Self::Signal(signal)),
            (3, ..) => Ok(Self::Kill),
            _ => Err(()),
        }
    }
}

impl From<SupervisorEvent> for MessagePacket {
    fn from(message: SupervisorEvent) -> Self {
        match message {
            SupervisorEvent::Prepared(id) => Self::new(11, id.pid.cast_signed(), id.started),
            SupervisorEvent::Started => Self::new(12, 0, 0),
            SupervisorEvent::ExecFailed(errno) => Self::new(13, errno, 0),
            SupervisorEvent::Stopped(signal) => Self::new(14, signal, 0),
            SupervisorEvent::Continued => Self::new(15, 0, 0),
            SupervisorEvent::Exited { code, stuck } => Self::new(16, code, stuck.into()),
            SupervisorEvent::Signalled { signal, stuck } => Self::new(17, signal, stuck.into()),
        }
    }
}

impl TryFrom<MessagePacket> for SupervisorEvent {
    type Error = ();
    fn try_from(packet: MessagePacket) -> Result<Self, ()> {
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
    fn every_message_round_trips() {
        use SupervisorEvent::*;
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
            assert_eq!(SupervisorEvent::try_from(MessagePacket::from(message)), Ok(message));
        }
        for message in [SupervisorCommand::Start, SupervisorCommand::Signal(15), SupervisorCommand::Kill] {
            assert_eq!(SupervisorCommand::try_from(MessagePacket::from(message)), Ok(message));
            assert!(SupervisorEvent::try_from(MessagePacket::from(message)).is_err());
        }
    }

    #[test]
    fn arguments_round_trip_and_foreign_ones_are_rejected() {
        for process_group in [JobProcessGroup::Own, JobProcessGroup::OfStarter(77)] {
            let arguments = vec!["-c".into(), "exit 3".into()];
            let arguments =
                SupervisorArguments { socket: 9, starter: 12, process_group, program: "sh".into(), arguments };
            assert_eq!(SupervisorArguments::parse(&arguments.to_arguments()), Some(arguments));
        }
        for wrong in [&["9", "1"][..], &[], &["x", "1", "0", "sh"], &["1", "1", "0", "sh"], &["9", "-1", "0", "sh"]] {
            let wrong: Vec<OsString> = wrong.iter().map(OsString::from).collect();
            assert_eq!(SupervisorArguments::parse(&wrong), None, "{wrong:?}");
        }
    }
}
