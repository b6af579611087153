//! What `gpupool run` says beside its command, on standard error. Nobody may be reading it, which is no reason to stop.

use std::fmt::Display;
use std::io::{IsTerminal, Write};

use rustix::termios::tcgetwinsize;

use super::limits::LINE_WIDTH;

/// How much is said.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Voice {
    /// What helps.
    Normal,
    /// Only what went wrong.
    Quiet,
}

impl Voice {
    /// Something good to know.
    pub fn note(self, text: impl Display) {
        if self == Self::Normal {
            self.warn(text);
        }
    }

    /// Something that went wrong.
    pub fn warn(self, text: impl Display) {
        let _ = writeln!(std::io::stderr().lock(), "gpupool: {text}");
    }

    /// A line that is written over again and again, where there is a terminal to do so and it is wanted.
    pub fn live_line(self) -> Option<LiveLine> {
        (self == Self::Normal && std::io::stderr().is_terminal()).then_some(LiveLine { is_shown: false })
    }
}

/// One line of the terminal. Wiped when dropped.
#[derive(Debug)]
pub(crate) struct LiveLine {
    is_shown: bool,
}

impl LiveLine {
    /// Shows this in place of what was there.
    pub fn show(&mut self, text: &str) {
        let width = tcgetwinsize(std::io::stderr()).map_or(0, |size| usize::from(size.ws_col));
        let width = if width == 0 { LINE_WIDTH } else { width };
        let mut out = std::io::stderr().lock();
        // The last column stays free: writing there makes some terminals begin a new line.
        let _ = write!(out, "\r{}\x1b[K", fitted(text, width - 1));
        let _ = out.flush();
        self.is_shown = true;
    }
}

impl Drop for LiveLine {
    fn drop(&mut self) {
        if self.is_shown {
            let mut out = std::io::stderr().lock();
            let _ = write!(out, "\x1b[2K\r");
            let _ = out.flush();
        }
    }
}

/// As much of a text as fits, without what would move the cursor.
fn fitted(text: &str, width: usize) -> String {
    let plain = text.chars().map(|c| if c.is_control() { ' ' } else { c });
    if text.chars().count() <= width {
        return plain.collect();
    }
    plain.take(width.saturating_sub(1)).chain(['…']).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_line_fits_and_moves_no_cursor() {
        assert_eq!(fitted("short", 10), "short");
        assert_eq!(fitted("a\x1b[2Jb\n", 10), "a [2Jb ");
        assert_eq!(fitted("much too long", 6), "much …");
        assert_eq!(fitted("x y", 0), "…");
    }
}
