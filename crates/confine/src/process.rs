//! A process known for sure: by its pid *and* the time it started, held by a pidfd.
//!
//! A pid alone is a number the kernel gives to the next process once the first has gone. Everything that is watched or
//! killed here is named by a [`ProcessId`] and held by a [`ProcessHandle`], which cannot come to mean another process.
//! No threads; a handle ends when it is dropped.

use std::collections::{HashMap, VecDeque};
use std::fs::File;
use std::io::{self, Read};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::{Path, PathBuf};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::{Errno, retry_on_intr};
use rustix::process::{Pid, PidfdFlags, Signal, pidfd_open, pidfd_send_signal};

use crate::limits::PROC_FILE_LENGTH;

/// Which process: its pid and when it started. Unique until the machine is started anew.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct ProcessId {
    /// The process id as this program's pid namespace sees it.
    pub pid: u32,
    /// Clock ticks between the start of the machine and that of the process (field 22 of `/proc/PID/stat`).
    pub started: u64,
}

impl ProcessId {
    /// The process that has this pid now; `None` if there is none.
    pub fn of_pid(pid: u32) -> io::Result<Option<Self>> {
        Ok(ProcFs::system().stat(pid)?.map(|stat| stat.id()))
    }

    /// This very process.
    pub fn current() -> io::Result<Self> {
        Self::of_pid(std::process::id())?.ok_or_else(|| io::Error::other("/proc does not show this process"))
    }
}

impl std::fmt::Display for ProcessId {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{} (started at tick {})", self.pid, self.started)
    }
}

/// A hold on one process: signals and waiting reach that process or nobody.
///
/// Its file descriptor becomes readable when the process has ended.
#[derive(Debug)]
pub struct ProcessHandle {
    id: ProcessId,
    pidfd: OwnedFd,
}

impl ProcessHandle {
    /// Holds the process, or says `None`: it has ended, or its pid belongs to another process by now.
    pub fn open(id: ProcessId) -> io::Result<Option<Self>> {
        let Some(pid) = as_pid(id.pid) else {
            return Ok(None);
        };
        let pidfd = match pidfd_open(pid, PidfdFlags::empty()) {
            Ok(pidfd) => pidfd,
            // INVAL, and NOENT on newer kernels: the number is that of a thread, not of a process.
            Err(Errno::SRCH | Errno::INVAL | Errno::NOENT) => return Ok(None),
            Err(error) => return Err(error.into()),
        };
        // The start time is read after the pidfd was taken: a match then proves that both mean the same process.
        match ProcFs::system().stat(id.pid)? {
            Some(stat) if stat.started == id.started && !stat.has_exited() => {}
            _ => return Ok(None),
        }
        let handle = Self { id, pidfd };
        Ok((!handle.has_exited()?).then_some(handle))
    }

    /// Which process this is.
    pub fn id(&self) -> ProcessId {
        self.id
    }

    /// Sends a signal; `false` if the process has gone already.
    pub fn signal(&self, signal: Signal) -> io::Result<bool> {
        match pidfd_send_signal(&self.pidfd, signal) {
            Ok(()) => Ok(true),
            Err(Errno::SRCH) => Ok(false),
            Err(error) => Err(error.into()),
        }
    }

    /// Whether the process has ended (it may still wait to be reaped by its parent).
    pub fn has_exited(&self) -> io::Result<bool> {
        let mut fds = [PollFd::new(&self.pidfd, PollFlags::IN)];
        Ok(retry_on_intr(|| poll(&mut fds, Some(&Timespec::default())))? > 0)
    }

    /// Its parent's pid; `None` if the process has gone.
    pub fn parent(&self) -> io::Result<Option<u32>> {
        let stat = ProcFs::system().stat(self.id.pid)?;
        Ok(stat.filter(|stat| stat.started == self.id.started).map(|stat| stat.parent))
    }

    /// The real user id it runs as; `None` if the process has gone.
    pub fn uid(&self) -> io::Result<Option<u32>> {
        let uid = ProcFs::system().uid(self.id.pid)?;
        // Read first, asked after: a process alive now is the one the number was read of.
        Ok(if self.has_exited()? { None } else { uid })
    }
}

impl AsFd for ProcessHandle {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.pidfd.as_fd()
    }
}

/// The pid as the system calls take it; `None` for 0 and for numbers no process can have.
pub(crate) fn as_pid(pid: u32) -> Option<Pid> {
    i32::try_from(pid).ok().and_then(Pid::from_raw)
}

/// Kills all there is below this process now; how many there were. Whoever they start meanwhile needs another round.
pub fn kill_descendants() -> usize {
    let found = ProcFs::system().descendants(std::process::id()).unwrap_or_default();
    for id in &found {
        if let Ok(Some(handle)) = ProcessHandle::open(*id) {
            // Not permitted means another user's process (sudo): it is counted as left.
            let _ = handle.signal(Signal::KILL);
        }
    }
    found.len()
}

/// Where processes are looked up: `/proc`, or a directory like it in tests. Processes may vanish at any moment while we
/// look; that is never an error.
#[derive(Debug, Clone)]
pub struct ProcFs {
    root: PathBuf,
}

impl ProcFs {
    /// The machine's own `/proc`.
    pub fn system() -> Self {
        Self::with_root("/proc")
    }

    /// A directory laid out like `/proc`.
    pub fn with_root(root: impl Into<PathBuf>) -> Self {
        Self { root: root.into() }
    }

    /// All descendants of a process, parents before children, without the process itself.
    pub fn descendants(&self, pid: u32) -> io::Result<Vec<ProcessId>> {
        if self.stat(pid)?.is_none() {
            return Ok(Vec::new());
        }
        Ok(Census::take(self)?.below(pid).into_iter().map(ProcessStat::id).collect())
    }

    /// Every process this user can see right now.
    pub fn processes(&self) -> io::Result<Vec<ProcessStat>> {
        let mut found = Vec::new();
        for entry in std::fs::read_dir(&self.root)? {
            let Ok(entry) = entry else { continue };
            let Some(pid) = entry.file_name().to_str().and_then(|name| name.parse().ok()) else {
                continue;
            };
            match self.stat(pid) {
                Ok(stat) => found.extend(stat),
                // To take this for "there are none" would let processes out of sight.
                Err(error) if matches!(error.raw_os_error(), Some(libc::EMFILE | libc::ENFILE | libc::ENOMEM)) => {
                    return Err(error);
                }
                // One that may not be looked at must not hide all others.
                Err(_) => {}
            }
        }
        Ok(found)
    }

    /// A process's `stat` line; `None` if there is no such process (or this user may not see it).
    pub fn stat(&self, pid: u32) -> io::Result<Option<ProcessStat>> {
        let Some(text) = self.read(pid, "stat")? else {
            return Ok(None);
        };
        let why = || format!("{}/{pid}/stat does not hold a process: {text:?}", self.root.display());
        ProcessStat::parse(&text).map(Some).ok_or_else(|| io::Error::new(io::ErrorKind::InvalidData, why()))
    }

    /// The real user id of a process.
    pub fn uid(&self, pid: u32) -> io::Result<Option<u32>> {
        let Some(text) = self.read(pid, "status")? else {
            return Ok(None);
        };
        let line = text.lines().find_map(|line| line.strip_prefix("Uid:"));
        Ok(line.and_then(|ids| ids.split_ascii_whitespace().next()?.parse().ok()))
    }

    /// One file of a process; `None` if the process has gone.
    pub(crate) fn read(&self, pid: u32, file: &str) -> io::Result<Option<String>> {
        match read_short(&self.root.join(format!("{pid}/{file}"))) {
            Ok(bytes) => Ok(Some(String::from_utf8_lossy(&bytes).into_owned())),
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
            Err(error) if error.raw_os_error() == Some(libc::ESRCH) => Ok(None),
            Err(error) => Err(error),
        }
    }
}

/// A file as the kernel writes them, of a few hundred bytes: without asking for its length first, which it does not have.
fn read_short(path: &Path) -> io::Result<Vec<u8>> {
    let mut bytes = Vec::with_capacity(1024);
    File::open(path)?.take(PROC_FILE_LENGTH).read_to_end(&mut bytes)?;
    Ok(bytes)
}

/// What we need of a process's `stat` line.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ProcessStat {
    /// Its process id.
    pub pid: u32,
    /// Its state letter: `R`, `S`, `D`, `T` (stopped), `Z` (ended, not yet reaped)…
    pub state: char,
    /// Its parent's pid.
    pub parent: u32,
    /// Its process group.
    pub group: i32,
    /// When it started, in clock ticks since the machine started.
    pub started: u64,
    /// How many threads it has.
    pub threads: u64,
    /// Processor time it used itself, in clock ticks.
    pub own_ticks: u64,
    /// Processor time of its children that ended and that it took note of, and of theirs, in clock ticks.
    pub reaped_ticks: u64,
}

impl ProcessStat {
    /// Reads a line; `None` if it is not one.
    pub fn parse(line: &str) -> Option<Self> {
        let pid = line.split(' ').next()?.parse().ok()?;
        // The command name stands in brackets and may itself hold brackets and blanks: fields count from the last one.
        let mut fields = line.get(line.rfind(')')? + 1..)?.split_ascii_whitespace();
        let state = fields.next()?.chars().next()?;
        let parent = fields.next()?.parse().ok()?;
        let group = fields.next()?.parse().ok()?;
        // The next one to be read is field 6. Not all are needed, and some may be negative.
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

    /// Which process it is.
    pub fn id(&self) -> ProcessId {
        ProcessId { pid: self.pid, started: self.started }
    }

    /// Whether it has ended and only waits for its parent to notice.
    pub fn has_exited(&self) -> bool {
        matches!(self.state, 'Z' | 'X' | 'x')
    }
}

/// Every process this user could see when it was taken, and who descends from whom: one look at `/proc` that serves many
/// questions.
#[derive(Debug, Default)]
pub(crate) struct Census {
    processes: HashMap<u32, ProcessStat>,
    children: HashMap<u32, Vec<u32>>,
}

impl Census {
    /// Looks at all processes. They are read one after the other, so a tree that changes meanwhile may lack a member.
    pub(crate) fn take(procfs: &ProcFs) -> io::Result<Self> {
        let mut census = Self::default();
        for stat in procfs.processes()? {
            census.children.entry(stat.parent).or_default().push(stat.pid);
            census.processes.insert(stat.pid, stat);
        }
        Ok(census)
    }

    /// The process that had this pid.
    pub(crate) fn get(&self, pid: u32) -> Option<&ProcessStat> {
        self.processes.get(&pid)
    }

    /// All descendants of a process, parents before children, without the process itself.
    pub(crate) fn below(&self, pid: u32) -> Vec<&ProcessStat> {
        let mut found: Vec<&ProcessStat> = Vec::new();
        let mut unvisited: VecDeque<&ProcessStat> = self.get(pid).into_iter().collect();
        while let Some(parent) = unvisited.pop_front() {
            // A child older than its parent means the parent's pid was given out anew while we looked.
            let own = self.children.get(&parent.pid).into_iter().flatten().filter_map(|child| self.get(*child));
            let own = own.filter(|child| child.started >= parent.started && child.pid != pid);
            let before = found.len();
            found.extend(own);
            unvisited.extend(&found[before..]);
        }
        found
    }
}

/// The bytes of a process that are in memory, those it shares with others included; none if it has gone.
pub(crate) fn resident(procfs: &ProcFs, pid: u32) -> u64 {
    let Ok(Some(text)) = procfs.read(pid, "statm") else { return 0 };
    let pages = text.split_ascii_whitespace().nth(1).and_then(|pages| pages.parse::<u64>().ok());
    pages.unwrap_or(0).saturating_mul(rustix::param::page_size() as u64)
}

/// The same with each shared page counted in proportion to how many share it. Takes the kernel long for large
/// processes. `None` where it may not be read (another user's process), is not told (old kernels), or the process has
/// gone.
pub(crate) fn proportional(procfs: &ProcFs, pid: u32) -> Option<u64> {
    kibibytes(&procfs.read(pid, "smaps_rollup").ok()??, "Pss:")
}

fn kibibytes(text: &str, field: &str) -> Option<u64> {
    let value = text.lines().find_map(|line| line.strip_prefix(field))?;
    let kib: u64 = value.trim().strip_suffix("kB")?.trim_end().parse().ok()?;
    kib.checked_mul(1024)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_wrong_start_time_or_an_impossible_pid_is_nobody() {
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
    fn a_handle_sees_the_end_and_signals_nobody_after_it() {
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
        // What /proc also holds: things that are no process, and a process that went away between listing and reading.
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
    fn a_tree_holds_all_descendants_and_nobody_else() {
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
    fn a_circle_ends() {
        assert_eq!(tree_of(10, &[(10, 11, 5), (11, 10, 5)]), [11]);
    }

    const TAIL: &str = "S 7 42 7 0 -1 4194304 1 0 0 0 11 3 70 5 20 -5 4 0 98765 2703360 88 18446744073709551615";

    #[test]
    fn a_name_with_brackets_and_blanks_shifts_no_field() {
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
        fn no_text_makes_it_panic(text in ".{0,200}") {
            let _ = ProcessStat::parse(&text);
            let _ = ProcessStat::parse(&format!("1 ({text}) {text}"));
        }
    }

    #[test]
    fn shares_are_read_and_nonsense_is_not() {
        assert_eq!(
            kibibytes("5600-7ff ---p 00 00:00 0 [rollup]\nRss: 900 kB\nPss:    123 kB\n", "Pss:"),
            Some(123 * 1024)
        );
        assert_eq!(kibibytes("Rss: 900 kB\n", "Pss:"), None);
        assert_eq!(kibibytes("Pss: 99999999999999999999 kB\n", "Pss:"), None);
    }

    #[test]
    fn what_this_process_has_in_memory_is_seen_both_ways() {
        let block = std::hint::black_box(vec![1_u8; 64 << 20]);
        let ours = std::process::id();
        let resident = resident(&ProcFs::system(), ours);
        assert!(resident >= block.len() as u64, "{resident}");
        // The kernel leaves something out now and then while other threads change what is mapped.
        let seen: Vec<_> = (0..20).map(|_| proportional(&ProcFs::system(), ours)).collect();
        assert!(seen.iter().any(|seen| seen.is_none_or(|bytes| bytes >= block.len() as u64)), "{seen:?}");
    }

    #[test]
    fn nobody_uses_nothing() {
        assert_eq!(resident(&ProcFs::system(), u32::MAX), 0);
        assert_eq!(proportional(&ProcFs::system(), u32::MAX), None);
    }
}
