//! What the terminal can show: how wide it is, and whether colours are welcome.

use std::io::{self, IsTerminal};

/// Where an answer goes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Screen {
    /// Columns there are; `None` where lines may have any length, as in a file.
    pub width: Option<usize>,
    /// Whether colours are wanted.
    pub colours: bool,
}

/// Narrower is taken for this: nothing could be told in less.
const LEAST_COLUMNS: usize = 40;

impl Screen {
    /// What standard output is: `COLUMNS` where it is set, else the terminal's width. Colours on a terminal only, and not
    /// where `NO_COLOR` is set or the terminal is a dumb one.
    pub fn here() -> Self {
        let out = io::stdout();
        let set = |name: &str| std::env::var(name).ok().filter(|value| !value.is_empty());
        let asked = set("COLUMNS").and_then(|columns| columns.parse().ok()).filter(|columns| *columns > 0);
        let size = || rustix::termios::tcgetwinsize(&out).ok().map(|size| size.ws_col.into());
        let width: Option<usize> = asked.or_else(|| size().filter(|columns| *columns > 0));
        let is_dumb = set("TERM").is_some_and(|terminal| terminal == "dumb");
        Self {
            width: width.map(|width| width.max(LEAST_COLUMNS)),
            colours: out.is_terminal() && set("NO_COLOR").is_none() && !is_dumb,
        }
    }

    /// The text in a colour, where colours are wanted.
    pub fn paint(self, paint: Paint, text: &str) -> String {
        let code = match paint {
            Paint::Plain => return text.to_owned(),
            _ if !self.colours || text.is_empty() => return text.to_owned(),
            Paint::Heading => "1",
            Paint::Faint => "2",
            Paint::Bad => "31",
            Paint::Odd => "33",
        };
        format!("\x1b[{code}m{text}\x1b[0m")
    }
}

/// What a colour is to say; the words say it too.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(crate) enum Paint {
    /// Nothing.
    #[default]
    Plain,
    /// A heading.
    Heading,
    /// Of no importance now.
    Faint,
    /// Something is broken.
    Bad,
    /// Something is not as it should be.
    Odd,
}
