//! Text for terminals: width, colours, sanitizing and tables.
//!
//! Foreign text (names of users, processes and devices) is sanitized before it is printed: characters that move the
//! cursor, change the writing direction or are invisible are replaced. A table that is too wide truncates its text
//! columns, then drops the least important columns; the last column can wrap.

use std::io::{self, IsTerminal};

use gpupool_core::is_plain;
use unicode_width::UnicodeWidthChar;

/// Width and colour support of an output.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct TerminalFormat {
    /// Width in columns; `None` for unlimited, as in a file.
    pub width: Option<usize>,
    pub colours: bool,
}

/// Minimum width; narrower terminals are treated as this wide.
const MIN_COLUMNS: usize = 40;

impl TerminalFormat {
    /// Returns the format of standard output: the width is `COLUMNS` or the terminal's. Colours are used on terminals
    /// unless `NO_COLOR` is set or `TERM` is `dumb`.
    pub fn of_stdout() -> Self {
        let out = io::stdout();
        let set = |name: &str| std::env::var(name).ok().filter(|value| !value.is_empty());
        let configured = set("COLUMNS").and_then(|columns| columns.parse().ok()).filter(|columns| *columns > 0);
        let size = || rustix::termios::tcgetwinsize(&out).ok().map(|size| size.ws_col.into());
        let width: Option<usize> = configured.or_else(|| size().filter(|columns| *columns > 0));
        let is_dumb = set("TERM").is_some_and(|terminal| terminal == "dumb");
        Self {
            width: width.map(|width| width.max(MIN_COLUMNS)),
            colours: out.is_terminal() && set("NO_COLOR").is_none() && !is_dumb,
        }
    }

    /// Applies a style if colours are supported.
    pub fn apply_style(self, style: TextStyle, text: &str) -> String {
        let code = match style {
            TextStyle::Plain => return text.to_owned(),
            _ if !self.colours || text.is_empty() => return text.to_owned(),
            TextStyle::Heading => "1",
            TextStyle::Faint => "2",
            TextStyle::Bad => "31",
            TextStyle::Odd => "33",
        };
        format!("\x1b[{code}m{text}\x1b[0m")
    }
}

/// Meaning of a colour; the text always has the same information.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(crate) enum TextStyle {
    #[default]
    Plain,
    Heading,
    /// Unimportant, such as an ended lease.
    Faint,
    /// Broken.
    Bad,
    /// Unusual.
    Odd,
}

const GAP: &str = "  ";

/// Layout of a table column.
#[derive(Debug, Clone, Copy)]
pub(crate) struct TableColumn {
    heading: &'static str,
    is_number: bool,
    /// Minimum width; `None` if the column is never truncated.
    min_width: Option<usize>,
    /// Columns with the lowest value are dropped first.
    drop_priority: u8,
    is_wrapping: bool,
}

impl TableColumn {
    /// Creates a left-aligned column that is never truncated or dropped.
    pub const fn text(heading: &'static str) -> Self {
        Self { heading, is_number: false, min_width: None, drop_priority: u8::MAX, is_wrapping: false }
    }

    /// Creates a right-aligned column for numbers.
    pub const fn number(heading: &'static str) -> Self {
        Self { is_number: true, ..Self::text(heading) }
    }

    /// Allows truncating the column to this width.
    pub const fn min_width(self, min_width: usize) -> Self {
        Self { min_width: Some(min_width), ..self }
    }

    /// Allows dropping the column if the table is too wide, lowest value first.
    pub const fn drop_priority(self, drop_priority: u8) -> Self {
        Self { drop_priority, ..self }
    }

    /// Wraps the column instead of truncating it.
    pub const fn wrapping(self) -> Self {
        Self { is_wrapping: true, ..self }
    }
}

/// Table with `N` columns.
pub(crate) struct TextTable<const N: usize> {
    columns: [TableColumn; N],
    rows: Vec<([String; N], TextStyle)>,
}

impl<const N: usize> TextTable<N> {
    pub fn new(columns: [TableColumn; N]) -> Self {
        Self { columns, rows: Vec::new() }
    }

    /// Adds a row and sanitizes its cells.
    pub fn add_row(&mut self, cells: [String; N], style: TextStyle) {
        self.rows.push((cells.map(|cell| sanitize(&cell)), style));
    }

    pub fn is_empty(&self) -> bool {
        self.rows.is_empty()
    }

    /// Renders the table for standard output, or returns the sentence if it is empty.
    pub fn render_or(&self, sentence: &str) -> String {
        if self.is_empty() { sentence.into() } else { self.render(TerminalFormat::of_stdout()) }
    }

    pub fn render(&self, format: TerminalFormat) -> String {
        let widths = self.column_widths(format.width.unwrap_or(usize::MAX));
        let headings = self.columns.map(|column| column.heading.to_owned());
        let mut text = self.render_row(&headings, &widths, TextStyle::Heading, format);
        for (cells, style) in &self.rows {
            text.push_str(&self.render_row(cells, &widths, *style, format));
        }
        text
    }

    /// Computes the column widths; `None` for dropped columns.
    fn column_widths(&self, width: usize) -> [Option<usize>; N] {
        let natural: [usize; N] = std::array::from_fn(|at| {
            let cells = self.rows.iter().map(|(cells, _)| display_width(&cells[at]));
            cells.max().unwrap_or(0).max(display_width(self.columns[at].heading))
        });
        let mut widths = natural.map(Some);
        // Columns without content are dropped.
        for (at, column) in self.columns.iter().enumerate() {
            if column.drop_priority < u8::MAX && self.rows.iter().all(|(cells, _)| cells[at].is_empty()) {
                widths[at] = None;
            }
        }
        loop {
            if self.shrink_columns(&mut widths, width) {
                return widths;
            }
            let shown = (0..N).filter(|at| widths[*at].is_some() && self.columns[*at].drop_priority < u8::MAX);
            let Some(lowest) = shown.min_by_key(|at| self.columns[*at].drop_priority) else { return widths };
            widths[lowest] = None;
            for at in 0..N {
                widths[at] = widths[at].map(|_| natural[at]);
            }
        }
    }

    /// Shrinks wrapping columns first, then the widest. Returns whether the table fits.
    fn shrink_columns(&self, widths: &mut [Option<usize>; N], width: usize) -> bool {
        let shown = widths.iter().flatten().count();
        let gaps = GAP.len() * shown.saturating_sub(1);
        let total =
            |widths: &[Option<usize>; N]| widths.iter().flatten().fold(gaps, |sum, width| sum.saturating_add(*width));
        let mut over = total(widths).saturating_sub(width);
        while over > 0 {
            let can = |at: &usize| {
                let min_width = self.columns[*at]
                    .min_width
                    .map(|min_width| min_width.max(display_width(self.columns[*at].heading)));
                matches!((widths[*at], min_width), (Some(width), Some(min_width)) if width > min_width)
            };
            let Some(widest) = (0..N).filter(can).max_by_key(|at| (self.columns[*at].is_wrapping, widths[*at])) else {
                return false;
            };
            widths[widest] = widths[widest].map(|width| width - 1);
            over -= 1;
        }
        true
    }

    fn render_row(
        &self,
        cells: &[String; N],
        widths: &[Option<usize>; N],
        style: TextStyle,
        format: TerminalFormat,
    ) -> String {
        let cells: Vec<(TableColumn, usize, Vec<String>)> = (0..N)
            .filter_map(|at| {
                let (column, width) = (self.columns[at], widths[at]?);
                let lines =
                    if column.is_wrapping { wrap_words(&cells[at], width) } else { vec![truncate(&cells[at], width)] };
                Some((column, width, lines))
            })
            .collect();
        let height = cells.iter().map(|(_, _, lines)| lines.len()).max().unwrap_or(0);
        let mut text = String::new();
        for at in 0..height {
            let padded = cells.iter().map(|(column, width, lines)| {
                let cell = lines.get(at).map_or("", String::as_str);
                let blanks = " ".repeat(width.saturating_sub(display_width(cell)));
                if column.is_number { format!("{blanks}{cell}") } else { format!("{cell}{blanks}") }
            });
            let line = padded.collect::<Vec<_>>().join(GAP);
            text.push_str(&format.apply_style(style, line.trim_end()));
            text.push('\n');
        }
        text
    }
}

/// Maximum length of foreign text.
const MAX_SHOWN_CHARS: usize = 2_000;

/// Formats a value, or `?` if it is unknown.
pub(crate) fn or_unknown(value: Option<impl ToString>) -> String {
    value.map_or_else(|| "?".into(), |value| value.to_string())
}

/// Replaces every character that is not shown as itself.
pub(crate) fn sanitize(text: &str) -> String {
    let shown = |c: char| if is_plain(c) { c } else { char::REPLACEMENT_CHARACTER };
    text.chars().take(MAX_SHOWN_CHARS).map(shown).collect()
}

/// Returns the number of columns that a text takes.
pub(crate) fn display_width(text: &str) -> usize {
    text.chars().map(char_width).sum()
}

fn char_width(c: char) -> usize {
    c.width().unwrap_or(0)
}

/// Truncates the text to the width, with `…` at the end.
pub(crate) fn truncate(text: &str, width: usize) -> String {
    if display_width(text) <= width {
        return text.to_owned();
    }
    let mut shown = String::new();
    let mut room = width.saturating_sub(1);
    for c in text.chars() {
        if char_width(c) > room {
            break;
        }
        room -= char_width(c);
        shown.push(c);
    }
    if width > 0 {
        shown.push('…');
    }
    shown
}

/// Splits the text into lines that fit, between words if possible.
pub(crate) fn wrap_words(text: &str, width: usize) -> Vec<String> {
    let width = width.max(2);
    let mut lines = vec![String::new()];
    for word in text.split_whitespace() {
        let line = lines.last_mut().map(|line| display_width(line)).unwrap_or(0);
        if line > 0 && line + 1 + display_width(word) <= width {
            push_char(&mut lines, ' ');
        } else if line > 0 {
            lines.push(String::new());
        }
        for c in word.chars() {
            if lines.last().is_some_and(|line| display_width(line) + char_width(c) > width) {
                lines.push(String::new());
            }
            push_char(&mut lines, c);
        }
    }
    lines
}

fn push_char(lines: &mut [String], c: char) {
    if let Some(line) = lines.last_mut() {
        line.push(c);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn characters_that_control_the_terminal_are_replaced() {
        assert_eq!(sanitize("a\u{1b}[31mb\n\u{202e}c\u{200b}\u{9b}"), "a�[31mb��c��");
        assert_eq!(sanitize("Zoë 日本"), "Zoë 日本");
        assert_eq!(sanitize(&"x".repeat(10_000)).len(), MAX_SHOWN_CHARS);
    }

    #[test]
    fn text_is_truncated_by_columns_and_never_inside_a_wide_character() {
        assert_eq!(truncate("日本語", 6), "日本語");
        assert_eq!((truncate("日本語", 5), display_width(&truncate("日本語", 5))), ("日本…".into(), 5));
        assert_eq!((truncate("日本語", 4), display_width(&truncate("日本語", 4))), ("日…".into(), 3));
        assert_eq!(
            (truncate("abc", 0), truncate("abc", 1), truncate("abc", 3)),
            (String::new(), "…".into(), "abc".into())
        );
    }

    #[test]
    fn text_wraps_between_words_and_long_words_break_anywhere() {
        assert_eq!(wrap_words("one two three", 7), ["one two", "three"]);
        assert_eq!(wrap_words("abcdefgh ij", 4), ["abcd", "efgh", "ij"]);
        assert_eq!(wrap_words("", 4), [""]);
        assert!(wrap_words(&"日 ".repeat(50), 9).iter().all(|line| display_width(line) <= 9));
    }

    fn example_table() -> TextTable<4> {
        let mut table = TextTable::new([
            TableColumn::number("GPU"),
            TableColumn::text("NAME").min_width(6),
            TableColumn::text("LABEL").drop_priority(1),
            TableColumn::text("WHY").min_width(10).wrapping(),
        ]);
        let why = "all GPUs are promised to others";
        table.add_row(["0".into(), "NVIDIA H100 80GB".into(), "rack 7".into(), why.into()], TextStyle::Plain);
        table.add_row(["1".into(), "日本\u{1b}[2J".into(), String::new(), String::new()], TextStyle::Odd);
        table
    }

    fn rendered_at(width: usize) -> String {
        example_table().render(TerminalFormat { width: Some(width), colours: false })
    }

    #[test]
    fn a_wide_terminal_shows_everything() {
        let text = rendered_at(200);
        assert_eq!(
            text,
            "GPU  NAME              LABEL   WHY\n  0  NVIDIA H100 80GB  rack 7  all GPUs are promised to others\n  1  日本�[2J\n"
        );
        assert_eq!(example_table().render(TerminalFormat { width: None, colours: false }), text);
    }

    #[test]
    fn a_narrow_terminal_truncates_text_then_drops_columns() {
        assert_eq!(
            rendered_at(45),
            format!(
                "GPU  NAME              LABEL   WHY\n  0  NVIDIA H100 80GB  rack 7  all GPUs are\n{0}promised to\n{0}others\n  1  日本�[2J\n",
                " ".repeat(31)
            )
        );
        assert!(rendered_at(40).contains("NVIDIA H100 80…  rack 7"), "{}", rendered_at(40));
        let narrow = rendered_at(24);
        assert!(!narrow.contains("LABEL") && narrow.contains("others"), "{narrow}");
        for width in 24..80 {
            assert!(
                rendered_at(width).lines().all(|line| display_width(line) <= width),
                "{width}:\n{}",
                rendered_at(width)
            );
        }
    }

    #[test]
    fn colours_cover_whole_lines_and_can_be_off() {
        let text = example_table().render(TerminalFormat { width: Some(200), colours: true });
        assert!(text.contains("\n\x1b[33m  1  日本�[2J\x1b[0m\n"), "{text}");
        assert!(!rendered_at(200).contains('\x1b'));
    }
}
