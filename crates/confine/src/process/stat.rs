//! One line of `/proc/PID/stat`.

use super::ProcessId;

/// What we need of a process's `stat` line.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Stat {
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

impl Stat {
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
    pub fn has_ended(&self) -> bool {
        matches!(self.state, 'Z' | 'X' | 'x')
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const TAIL: &str = "S 7 42 7 0 -1 4194304 1 0 0 0 11 3 70 5 20 -5 4 0 98765 2703360 88 18446744073709551615";

    #[test]
    fn a_name_with_brackets_and_blanks_shifts_no_field() {
        for name in ["sleep", "a b", ") Z 1 (", "((()", ""] {
            let stat = Stat::parse(&format!("43 ({name}) {TAIL}")).unwrap();
            let expected = Stat {
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
            let _ = Stat::parse(&text);
            let _ = Stat::parse(&format!("1 ({text}) {text}"));
        }
    }
}
