//! A process identified by its pid *and* its start time, and held by a pidfd.
//!
//! The kernel reuses the pid of a process that is gone. A [`ProcessId`] therefore names and a
//! [`ProcessHandle`] holds every process that this crate watches or kills; neither can ever refer to another process. No
//! threads; a handle ends when it is dropped.

use std::collections::{HashMap, VecDeque};
use std::fs::File;
use std::io::{self, Read};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::{Path, PathBuf};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::{Errno, retry_on_intr};
use rustix::process::{Pid, PidfdFlags, Signal, pidfd_open, pidfd_send_signal};

use crate::limits::MAX_PROC_FILE_LENGTH;

/// Identity of a process: its pid and start time. Unique until the machine restarts.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct ProcessId {
    /// Process id in this program's pid namespace.
    pub pid: u32,
    /// Clock ticks between the start of the machine and the start of the process (field 22 of `/proc/PID/stat`).
    pub started: u64,
}

impl ProcessId {
    /// Returns the process that has this pid now; `None` if there is none.
    pub fn of_pid(pid: u32) -> io::Result<Option<Self>> {
        Ok(ProcFs::system().stat(pid)?.map(|stat| stat.id()))
    }

    /// Returns this process.
    pub fn current() -> io::Result<Self> {
        Self::of_pid(std::process::id())?.ok_or_else(|| io::Error::other("/proc does not show this process"))
    }
}

impl std::fmt::Display for ProcessId {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{} (started at tick {})", self.pid, self.started)
    }
}

/// Handle of one process: signals and waits reach this process or none.
///
/// Its file descriptor becomes readable when the process has exited.
#[derive(Debug)]
pub struct ProcessHandle {
    id: ProcessId,
    pidfd: OwnedFd,
}

impl ProcessHandle {
    /// Opens the process; `None` if it has exited or its pid belongs to another process.
    pub fn open(id: ProcessId) -> io::Result<Option<Self>> {
        let Some(pid) = as_pid(id.pid) else {
            return Ok(None);
        };
        let pidfd = match pidfd_open(pid, PidfdFlags::empty()) {
            Ok(pidfd) => pidfd,
            // INVAL, and NOENT on newer kernels: the number belongs to a thread, not to a process.
            Err(Errno::SRCH | Errno::INVAL | Errno::NOENT) => return Ok(None),
            Err(error) => return Err(error.into()),
        };
        // The start time is read after the pidfd was opened: a match proves that both refer to the same process.
        match ProcFs::system().stat(id.pid)? {
            Some(stat) if stat.started == id.started && !stat.has_exited() => {}
            _ => return Ok(None),
        }
        let handle = Self { id, pidfd };
        Ok((!handle.has_exited()?).then_some(handle))
    }

    /// Returns the identity of the process.
    pub fn id(&self) -> ProcessId {
        self.id
    }

    /// Sends a signal; `false` if the process is already gone.
    pub fn signal(&self, signal: Signal) -> io::Result<bool> {
        match pidfd_send_signal(&self.pidfd, signal) {
            Ok(()) => Ok(true),
            Err(Errno::SRCH) => Ok(false),
            Err(error) => Err(error.into()),
        }
    }

    /// Whether the process has exited (its parent may not have reaped it yet).
    pub fn has_exited(&self) -> io::Result<bool> {
        let mut fds = [PollFd::new(&self.pidfd, PollFlags::IN)];
        Ok(retry_on_intr(|| poll(&mut fds, Some(&Timespec::default())))? > 0)
    }

    /// Returns the pid of the parent; `None` if the process is gone.
    pub fn parent(&self) -> io::Result<Option<u32>> {
        let stat = ProcFs::system().stat(self.id.pid)?;
        Ok(stat.filter(|stat| stat.started == self.id.started).map(|stat| stat.parent))
    }

    /// Returns the real user id; `None` if the process is gone.
    pub fn uid(&self) -> io::Result<Option<u32>> {
        let uid = ProcFs::system().uid(self.id.pid)?;
        // Checked after the read: if the process still lives, the id was its own.
        Ok(if self.has_exited()? { None } else { uid })
    }
}

impl AsFd for ProcessHandle {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.pidfd.as_fd()
    }
}

/// Converts a pid for system calls; `None` for 0 and for impossible numbers.
pub(crate) fn as_pid(pid: u32) -> Option<Pid> {
    i32::try_from(pid).ok().and_then(Pid::from_raw)
}

/// Kills all descendants of this process and returns their number. Processes that they start meanwhile need another
/// round.
pub fn kill_descendants() -> usize {
    let found = ProcFs::system().descendants(std::process::id()).unwrap_or_default();
    for id in &found {
        if let Ok(Some(handle)) = ProcessHandle::open(*id) {
            // A process of another user (sudo) refuses the signal and counts as left.
            let _ = handle.signal(Signal::KILL);
        }
    }
    found.len()
}

/// Source of process information: `/proc`, or a directory like it in tests. Processes may vanish during a read; that is
/// never an error.
#[derive(Debug, Clone)]
pub struct ProcFs {
    root: PathBuf,
}

impl ProcFs {
    /// Returns the machine's own `/proc`.
    pub fn system() -> Self {
        Self::with_root("/proc")
    }

    /// Returns a directory laid out like `/proc`.
    pub fn with_root(root: impl Into<PathBuf>) -> Self {
        Self { root: root.into() }
    }

    /// Returns all descendants of a process, parents before children, without the process itself.
    pub fn descendants(&self, pid: u32) -> io::Result<Vec<ProcessId>> {
        if self.stat(pid)?.is_none() {
            return Ok(Vec::new());
        }
        Ok(ProcessSnapshot::read(self)?.descendants(pid).into_iter().map(ProcessStat::id).collect())
    }

    /// Returns every process that this user can see now.
    pub fn processes(&self) -> io::Result<Vec<ProcessStat>> {
        let mut found = Vec::new();
        for entry in std::fs::read_dir(&self.root)? {
            let Ok(entry) = entry else { continue };
            let Some(pid) = entry.file_name().to_str().and_then(|name| name.parse().ok()) else {
                continue;
            };
            match self.stat(pid) {
                Ok(stat) => found.extend(stat),
                // Reading this as "no process" would lose processes.
                Err(error) if matches!(error.raw_os_error(), Some(libc::EMFILE | libc::ENFILE | libc::ENOMEM)) => {
                    return Err(error);
                }
                // One unreadable process must not hide the others.
                Err(_) => {}
            }
        }
        Ok(found)
    }

    /// Returns the `stat` line of a process; `None` if the process does not exist or is hidden from this user.
    pub fn stat(&self, pid: u32) -> io::Result<Option<ProcessStat>> {
        let Some(text) = self.read(pid, "stat")? else {
            return Ok(None);
        };
        let why = || format!("{}/{pid}/stat is not a valid stat line: {text:?}", self.root.display());
        ProcessStat::parse(&text).map(Some).ok_or_else(|| io::Error::new(io::ErrorKind::InvalidData, why()))
    }

    /// Returns the real user id of a process.
    pub fn uid(&self, pid: u32) -> io::Result<Option<u32>> {
        let Some(text) = self.read(pid, "status")? else {
            return Ok(None);
        };
        let line = text.lines().find_map(|line| line.strip_prefix("Uid:"));
        Ok(line.and_then(|ids| ids.split_ascii_whitespace().next()?.parse().ok()))
    }

    /// Reads one file of a process; `None` if the process is gone.
    pub(crate) fn read(&self, pid: u32, file: &str) -> io::Result<Option<String>> {
        match read_proc_file(&self.root.join(format!("{pid}/{file}"))) {
            Ok(bytes) => Ok(Some(String::from_utf8_lossy(&bytes).into_owned())),
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
            Err(error) if error.raw_os_error() == Some(libc::ESRCH) => Ok(None),
            Err(error) => Err(error),
        }
    }
}

/// Reads a file of a few hundred bytes that the kernel generates, without asking for its length, which is always 0.
fn read_proc_file(path: &Path) -> io::Result<Vec<u8>> {
    let mut bytes = Vec::with_capacity(1024);
    File::open(path)?.take(MAX_PROC_FILE_LENGTH).read_to_end(&mut bytes)?;
    Ok(bytes)
}

/// Fields of a process's `stat` line that this crate uses.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ProcessStat {
    /// Process id.
    pub pid: u32,
    /// State letter: `R`, `S`, `D`, `T` (stopped), `Z` (exited, not yet reaped)…
    pub state: char,
    /// Pid of the parent.
    pub parent: u32,
    /// Process group.
    pub group: i32,
    /// Start time in clock ticks since the machine started.
    pub started: u64,
    /// Number of threads.
    pub threads: u64,
    /// CPU time of the process itself, in clock ticks.
    pub own_ticks: u64,
    /// CPU time of its reaped children and of theirs, in clock ticks.
    pub reaped_ticks: u64,
}

impl ProcessStat {
    /// Parses a line; `None` if it is invalid.
    pub fn parse(line: &str) -> Option<Self> {
        let pid = line.split(' ').next()?.parse().ok()?;
        // The command name is in brackets and may contain brackets and blanks: fields count from the last bracket.
        let mut fields = line.get(line.rfind(')')? + 1..)?.split_ascii_whitespace();
        let state = fields.next()?.chars().next()?;
        let parent = fields.next()?.parse().ok()?;
        let group = fields.next()?.parse().ok()?;
        // The next field is number 6. Not all fields are needed, and some may be negative.
        let fields: Vec<&str> = fields.collect();
        let field = |number: usize| fields.get(number - 6)?.parse::<u64>().ok();
        Some(Self {
            pid,
            state,
            parent,
            group,
            started: field(22)?,
            threads: field(20)?.max(1),
            own_ticks: field(14)?.saturating_add(field(15)?),
            reaped_ticks: field(16)?.saturating_add(field(17)?),
        })
    }

    /// Returns the identity of the process.
    pub fn id(&self) -> ProcessId {
        ProcessId { pid: self.pid, started: self.started }
    }

    /// Whether the process has exited and waits for its parent to reap it.
    pub fn has_exited(&self) -> bool {
        matches!(self.state, 'Z' | 'X' | 'x')
    }
}

/// All processes visible to this user at one time, with their parents: one scan of `/proc` for many queries.
#[derive(Debug, Default)]
pub(crate) struct ProcessSnapshot {
    processes: HashMap<u32, ProcessStat>,
    children: HashMap<u32, Vec<u32>>,
}

impl ProcessSnapshot {
    /// Scans all processes, one after the other. A tree that changes meanwhile may lack a member.
    pub(crate) fn read(procfs: &ProcFs) -> io::Result<Self> {
        let mut snapshot = Self::default();
        for stat in procfs.processes()? {
            snapshot.children.entry(stat.parent).or_default().push(stat.pid);
            snapshot.processes.insert(stat.pid, stat);
        }
        Ok(snapshot)
    }

    /// Returns the process that had this pid.
    pub(crate) fn get(&self, pid: u32) -> Option<&ProcessStat> {
        self.processes.get(&pid)
    }

    /// Returns all descendants of a process, parents before children, without the process itself.
    pub(crate) fn descendants(&self, pid: u32) -> Vec<&ProcessStat> {
        let mut found: Vec<&ProcessStat> = Vec::new();
        let mut unvisited: VecDeque<&ProcessStat> = self.get(pid).into_iter().collect();
        while let Some(parent) = unvisited.pop_front() {
            // A child older than its parent means that the parent's pid was reused during the scan.
            let own = self.children.get(&parent.pid).into_iter().flatten().filter_map(|child| self.get(*child));
            let own = own.filter(|child| child.started >= parent.started && child.pid != pid);
            let before = found.len();
            found.extend(own);
            unvisited.extend(&found[before..]);
        }
        found
    }
}

/// Returns the resident bytes of a process, shared pages included; 0 if the process is gone.
pub(crate) fn resident_memory(procfs: &ProcFs, pid: u32) -> u64 {
    let Ok(Some(text)) = procfs.read(pid, "statm") else { return 0 };
    let pages = text.split_ascii_whitespace().nth(1).and_then(|pages| pages.parse::<u64>().ok());
    pages.unwrap_or(0).saturating_mul(rustix::param::page_size() as u64)
}

/// Returns the resident bytes with each shared page divided by its number of users. Slow for large processes. `None` if
/// the file is not readable (another user's process), the kernel is too old, or the process is gone.
pub(crate) fn proportional_memory(procfs: &ProcFs, pid: u32) -> Option<u64> {
    parse_kibibytes(&procfs.read(pid, "smaps_rollup").ok()??, "Pss:")
}

fn parse_kibibytes(text: &str, field: &str) -> Option<u64> {
    let value = text.lines().find_map(|line| line.strip_prefix(field))?;
    let kib: u64 = value.trim().strip_suffix("kB")?.trim_end().parse().ok()?;
    kib.checked_mul(1024)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_wrong_start_time_or_an_impossible_pid_is_not_a_process() {
        let ours = ProcessId::current().unwrap();
        assert!(ProcessHandle::open(ours).unwrap().is_some());
        for stranger in [
            ProcessId { started: ours.started + 1, ..ours },
            ProcessId { started: 0, ..ours },
            ProcessId { pid: 0, started: 0 },
            ProcessId { pid: u32::MAX, started: 1 },
        ] {
            assert!(ProcessHandle::open(stranger).unwrap().is_none(), "{stranger:?} was taken for a process");
        }
    }

    #[test]
    fn a_handle_detects_the_exit_and_signals_no_later_process() {
        let mut child = std::process::Command::new("sleep").arg("600").spawn().unwrap();
        let id = ProcessId::of_pid(child.id()).unwrap().unwrap();
        let handle = ProcessHandle::open(id).unwrap().unwrap();
        assert!(!handle.has_exited().unwrap());
        assert_eq!(handle.parent().unwrap(), Some(std::process::id()));
        assert_eq!(handle.uid().unwrap(), Some(rustix::process::getuid().as_raw()));

        assert!(handle.signal(Signal::KILL).unwrap());
        poll(&mut [PollFd::new(&handle, PollFlags::IN)], None).unwrap();
        assert!(handle.has_exited().unwrap());
        assert!(ProcessHandle::open(id).unwrap().is_none(), "an ended process still waiting for its parent is gone");
        child.wait().unwrap();
        assert!(!handle.signal(Signal::KILL).unwrap());
        assert_eq!(handle.parent().unwrap(), None);
        assert_eq!(handle.uid().unwrap(), None);
    }

    fn proc_with(processes: &[(u32, u32, u64)]) -> tempfile::TempDir {
        let root = tempfile::tempdir().unwrap();
        for (pid, parent, started) in processes {
            let directory = root.path().join(pid.to_string());
            std::fs::create_dir(&directory).unwrap();
            let stat = format!("{pid} (p) S {parent} 1 1 0 -1 0 0 0 0 0 0 0 0 0 20 0 1 0 {started} 0 0");
            std::fs::write(directory.join("stat"), stat).unwrap();
        }
        // /proc also holds entries that are no process, and processes that exit between listing and reading.
        std::fs::create_dir(root.path().join("sys")).unwrap();
        std::fs::create_dir(root.path().join("4000")).unwrap();
        std::fs::create_dir(root.path().join("4001")).unwrap();
        std::fs::write(root.path().join("4001/stat"), "nonsense").unwrap();
        root
    }

    fn tree_of(pid: u32, processes: &[(u32, u32, u64)]) -> Vec<u32> {
        let root = proc_with(processes);
        let mut pids: Vec<u32> =
            ProcFs::with_root(root.path()).descendants(pid).unwrap().iter().map(|id| id.pid).collect();
        pids.sort_unstable();
        pids
    }

    #[test]
    fn a_tree_holds_exactly_the_descendants() {
        let processes = [(1, 0, 0), (10, 1, 5), (11, 10, 6), (12, 11, 7), (13, 10, 7), (20, 1, 5), (21, 20, 9)];
        assert_eq!(tree_of(10, &processes), [11, 12, 13]);
        assert_eq!(tree_of(12, &processes), []);
        assert_eq!(tree_of(99, &processes), []);
    }

    #[test]
    fn a_child_older_than_its_parent_is_not_its_child() {
        assert_eq!(tree_of(10, &[(10, 1, 50), (11, 10, 49), (12, 11, 60)]), []);
    }

    #[test]
    fn a_cycle_of_parents_terminates() {
        assert_eq!(tree_of(10, &[(10, 11, 5), (11, 10, 5)]), [11]);
    }

    const TAIL: &str = "S 7 42 7 0 -1 4194304 1 0 0 0 11 3 70 5 20 -5 4 0 98765 2703360 88 18446744073709551615";

    #[test]
    fn brackets_and_blanks_in_a_name_do_not_shift_fields() {
        for name in ["sleep", "a b", ") Z 1 (", "((()", ""] {
            let stat = ProcessStat::parse(&format!("43 ({name}) {TAIL}")).unwrap();
            let expected = ProcessStat {
                pid: 43,
                state: 'S',
                parent: 7,
                group: 42,
                started: 98765,
                threads: 4,
                own_ticks: 14,
                reaped_ticks: 75,
            };
            assert_eq!(stat, expected, "name {name:?}");
        }
    }

    proptest::proptest! {
        #[test]
        fn no_text_makes_the_parser_panic(text in ".{0,200}") {
            let _ = ProcessStat::parse(&text);
            let _ = ProcessStat::parse(&format!("1 ({text}) {text}"));
        }
    }

    #[test]
    fn proportional_memory_is_parsed_and_nonsense_is_rejected() {
        assert_eq!(
            parse_kibibytes("5600-7ff ---p 00 00:00 0 [rollup]\nRss: 900 kB\nPss:    123 kB\n", "Pss:"),
            Some(123 * 1024)
        );
        assert_eq!(parse_kibibytes("Rss: 900 kB\n", "Pss:"), None);
        assert_eq!(parse_kibibytes("Pss: 99999999999999999999 kB\n", "Pss:"), None);
    }

    #[test]
    fn memory_of_this_process_is_measured_both_ways() {
        let block = std::hint::black_box(vec![1_u8; 64 << 20]);
        let ours = std::process::id();
        let resident = resident_memory(&ProcFs::system(), ours);
        assert!(resident >= block.len() as u64, "{resident}");
        // The kernel omits pages now and then while other threads change the mapping.
        let seen: Vec<_> = (0..20).map(|_| proportional_memory(&ProcFs::system(), ours)).collect();
        assert!(seen.iter().any(|seen| seen.is_none_or(|bytes| bytes >= block.len() as u64)), "{seen:?}");
    }

    #[test]
    fn a_missing_process_uses_no_memory() {
        assert_eq!(resident_memory(&ProcFs::system(), u32::MAX), 0);
        assert_eq!(proportional_memory(&ProcFs::system(), u32::MAX), None);
    }
}
