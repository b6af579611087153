//! All processes at one moment, and who descends from whom: one look at `/proc` that serves many questions.

use std::collections::{HashMap, VecDeque};
use std::io;

use super::{ProcFs, Stat};

/// Every process this user could see when it was taken.
#[derive(Debug, Default)]
pub(crate) struct Census {
    processes: HashMap<u32, Stat>,
    children: HashMap<u32, Vec<u32>>,
}

impl Census {
    /// Looks at all processes. They are read one after the other, so a tree that changes meanwhile may lack a member.
    pub(crate) fn take(procfs: &ProcFs) -> io::Result<Self> {
        let mut census = Self::default();
        for stat in procfs.all()? {
            census.children.entry(stat.parent).or_default().push(stat.pid);
            census.processes.insert(stat.pid, stat);
        }
        Ok(census)
    }

    /// The process that had this pid.
    pub(crate) fn get(&self, pid: u32) -> Option<&Stat> {
        self.processes.get(&pid)
    }

    /// All descendants of a process, parents before children, without the process itself.
    pub(crate) fn below(&self, pid: u32) -> Vec<&Stat> {
        let mut found: Vec<&Stat> = Vec::new();
        let mut unvisited: VecDeque<&Stat> = self.get(pid).into_iter().collect();
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
