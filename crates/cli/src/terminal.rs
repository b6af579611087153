//! Answers for people at a terminal: its width and colours, texts that cannot do harm there, and tables that fit.
//!
//! Text that comes from elsewhere (names of people, processes and devices) is cleaned before it is shown: nothing that moves
//! the cursor, changes the direction of writing or hides gets through. Where a table does not fit, its texts are shortened
//! down to a least width, then the columns that matter least are left out, and the last column may go on in the lines below.

use std::io::{self, IsTerminal};

use unicode_width::UnicodeWidthChar;

/// Where an answer goes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Screen {
    /// Columns there are; `None` where lines may have any length, as in a file.
    pub width: Option<usize>,
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
    #[default]
    Plain,
    Heading,
    /// Of no importance now.
    Faint,
    /// Something is broken.
    Bad,
    /// Something is not as it should be.
    Odd,
}

/// Between two columns.
const GAP: &str = "  ";

#[derive(Debug, Clone, Copy)]
pub(crate) struct Column {
    heading: &'static str,
    is_number: bool,
    /// How narrow it may become; as wide as its widest cell unless set.
    least: Option<usize>,
    /// Columns with the lowest weight are left out first.
    weight: u8,
    wraps: bool,
}

impl Column {
    /// A column of words that is always there and never cut.
    pub const fn words(heading: &'static str) -> Self {
        Self { heading, is_number: false, least: None, weight: u8::MAX, wraps: false }
    }

    /// A column of numbers, which stand on the right.
    pub const fn number(heading: &'static str) -> Self {
        Self { is_number: true, ..Self::words(heading) }
    }

    /// May be cut to so many columns.
    pub const fn at_least(self, least: usize) -> Self {
        Self { least: Some(least), ..self }
    }

    /// May be left out where there is no room, the lightest first.
    pub const fn weighs(self, weight: u8) -> Self {
        Self { weight, ..self }
    }

    /// Goes on in the lines below where it is cut.
    pub const fn wraps(self) -> Self {
        Self { wraps: true, ..self }
    }
}

pub(crate) struct Table<const N: usize> {
    columns: [Column; N],
    rows: Vec<([String; N], Paint)>,
}

impl<const N: usize> Table<N> {
    pub fn new(columns: [Column; N]) -> Self {
        Self { columns, rows: Vec::new() }
    }

    /// Adds a row. Cells may hold anything: what is not fit for a terminal is replaced.
    pub fn row(&mut self, cells: [String; N], paint: Paint) {
        self.rows.push((cells.map(|cell| clean(&cell)), paint));
    }

    pub fn is_empty(&self) -> bool {
        self.rows.is_empty()
    }

    /// The table as it fits here, or a sentence where it is empty.
    pub fn or(&self, sentence: &str) -> String {
        if self.is_empty() { sentence.into() } else { self.render(Screen::here()) }
    }

    /// The table in lines.
    pub fn render(&self, screen: Screen) -> String {
        let widths = self.widths(screen.width.unwrap_or(usize::MAX));
        let headings = self.columns.map(|column| column.heading.to_owned());
        let mut text = self.line(&headings, &widths, Paint::Heading, screen);
        for (cells, paint) in &self.rows {
            text.push_str(&self.line(cells, &widths, *paint, screen));
        }
        text
    }

    /// How wide each column becomes; `None` for those that are left out.
    fn widths(&self, width: usize) -> [Option<usize>; N] {
        let natural: [usize; N] = std::array::from_fn(|at| {
            let cells = self.rows.iter().map(|(cells, _)| columns(&cells[at]));
            cells.max().unwrap_or(0).max(columns(self.columns[at].heading))
        });
        let mut widths = natural.map(Some);
        // A column in which nothing is said says nothing.
        for (at, column) in self.columns.iter().enumerate() {
            if column.weight < u8::MAX && self.rows.iter().all(|(cells, _)| cells[at].is_empty()) {
                widths[at] = None;
            }
        }
        loop {
            if self.shrink(&mut widths, width) {
                return widths;
            }
            let shown = (0..N).filter(|at| widths[*at].is_some() && self.columns[*at].weight < u8::MAX);
            let Some(lightest) = shown.min_by_key(|at| self.columns[*at].weight) else { return widths };
            widths[lightest] = None;
            for at in 0..N {
                widths[at] = widths[at].map(|_| natural[at]);
            }
        }
    }

    /// Takes from the columns that can be cut, first from those that lose nothing by it, and always from the widest; says
    /// whether the table fits then.
    fn shrink(&self, widths: &mut [Option<usize>; N], width: usize) -> bool {
        let shown = widths.iter().flatten().count();
        let gaps = GAP.len() * shown.saturating_sub(1);
        let total =
            |widths: &[Option<usize>; N]| widths.iter().flatten().fold(gaps, |sum, width| sum.saturating_add(*width));
        let mut over = total(widths).saturating_sub(width);
        while over > 0 {
            let can = |at: &usize| {
                let least = self.columns[*at].least.map(|least| least.max(columns(self.columns[*at].heading)));
                matches!((widths[*at], least), (Some(width), Some(least)) if width > least)
            };
            let Some(widest) = (0..N).filter(can).max_by_key(|at| (self.columns[*at].wraps, widths[*at])) else {
                return false;
            };
            widths[widest] = widths[widest].map(|width| width - 1);
            over -= 1;
        }
        true
    }

    fn line(&self, cells: &[String; N], widths: &[Option<usize>; N], paint: Paint, screen: Screen) -> String {
        let cells: Vec<(Column, usize, Vec<String>)> = (0..N)
            .filter_map(|at| {
                let (column, width) = (self.columns[at], widths[at]?);
                let lines = if column.wraps { wrap(&cells[at], width) } else { vec![cut(&cells[at], width)] };
                Some((column, width, lines))
            })
            .collect();
        let height = cells.iter().map(|(_, _, lines)| lines.len()).max().unwrap_or(0);
        let mut text = String::new();
        for at in 0..height {
            let padded = cells.iter().map(|(column, width, lines)| {
                let cell = lines.get(at).map_or("", String::as_str);
                let blanks = " ".repeat(width.saturating_sub(columns(cell)));
                if column.is_number { format!("{blanks}{cell}") } else { format!("{cell}{blanks}") }
            });
            let line = padded.collect::<Vec<_>>().join(GAP);
            text.push_str(&screen.paint(paint, line.trim_end()));
            text.push('\n');
        }
        text
    }
}

/// No text from elsewhere is shown longer than this.
const SHOWN_CHARS: usize = 2_000;

/// A value, or `?` if it is unknown.
pub(crate) fn known(value: Option<impl ToString>) -> String {
    value.map_or_else(|| "?".into(), |value| value.to_string())
}

/// The text with every character that would not show as itself replaced.
pub(crate) fn clean(text: &str) -> String {
    let shown = |c: char| if is_harmless(c) { c } else { char::REPLACEMENT_CHARACTER };
    text.chars().take(SHOWN_CHARS).map(shown).collect()
}

fn is_harmless(c: char) -> bool {
    let hides_or_turns = matches!(c,
        '\u{ad}' | '\u{61c}' | '\u{180e}' | '\u{200b}'..='\u{200f}' | '\u{2028}'..='\u{202e}'
        | '\u{2060}'..='\u{206f}' | '\u{feff}' | '\u{fff9}'..='\u{fffb}' | '\u{e0000}'..='\u{e0fff}');
    !c.is_control() && !hides_or_turns
}

/// How many columns a text takes.
pub(crate) fn columns(text: &str) -> usize {
    text.chars().map(columns_of).sum()
}

fn columns_of(c: char) -> usize {
    c.width().unwrap_or(0)
}

/// The beginning of a text that fits, with `…` where something was left out.
pub(crate) fn cut(text: &str, width: usize) -> String {
    if columns(text) <= width {
        return text.to_owned();
    }
    let mut shown = String::new();
    let mut room = width.saturating_sub(1);
    for c in text.chars() {
        if columns_of(c) > room {
            break;
        }
        room -= columns_of(c);
        shown.push(c);
    }
    if width > 0 {
        shown.push('…');
    }
    shown
}

/// The text in lines that fit, broken between words where that is possible.
pub(crate) fn wrap(text: &str, width: usize) -> Vec<String> {
    let width = width.max(2);
    let mut lines = vec![String::new()];
    for word in text.split_whitespace() {
        let line = lines.last_mut().map(|line| columns(line)).unwrap_or(0);
        if line > 0 && line + 1 + columns(word) <= width {
            push(&mut lines, ' ');
        } else if line > 0 {
            lines.push(String::new());
        }
        for c in word.chars() {
            if lines.last().is_some_and(|line| columns(line) + columns_of(c) > width) {
                lines.push(String::new());
            }
            push(&mut lines, c);
        }
    }
    lines
}

fn push(lines: &mut [String], c: char) {
    if let Some(line) = lines.last_mut() {
        line.push(c);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_could_move_the_cursor_or_turn_the_writing_is_replaced() {
        assert_eq!(clean("a\u{1b}[31mb\n\u{202e}c\u{200b}\u{9b}"), "a�[31mb��c��");
        assert_eq!(clean("Zoë 日本"), "Zoë 日本");
        assert_eq!(clean(&"x".repeat(10_000)).len(), SHOWN_CHARS);
    }

    #[test]
    fn a_text_is_cut_by_columns_and_not_in_the_middle_of_a_wide_character() {
        assert_eq!(cut("日本語", 6), "日本語");
        assert_eq!((cut("日本語", 5), columns(&cut("日本語", 5))), ("日本…".into(), 5));
        assert_eq!((cut("日本語", 4), columns(&cut("日本語", 4))), ("日…".into(), 3));
        assert_eq!((cut("abc", 0), cut("abc", 1), cut("abc", 3)), (String::new(), "…".into(), "abc".into()));
    }

    #[test]
    fn a_text_is_broken_between_words_and_a_long_word_anywhere() {
        assert_eq!(wrap("one two three", 7), ["one two", "three"]);
        assert_eq!(wrap("abcdefgh ij", 4), ["abcd", "efgh", "ij"]);
        assert_eq!(wrap("", 4), [""]);
        assert!(wrap(&"日 ".repeat(50), 9).iter().all(|line| columns(line) <= 9));
    }

    fn example() -> Table<4> {
        let mut table = Table::new([
            Column::number("GPU"),
            Column::words("NAME").at_least(6),
            Column::words("LABEL").weighs(1),
            Column::words("WHY").at_least(10).wraps(),
        ]);
        let why = "all GPUs are promised to others";
        table.row(["0".into(), "NVIDIA H100 80GB".into(), "rack 7".into(), why.into()], Paint::Plain);
        table.row(["1".into(), "日本\u{1b}[2J".into(), String::new(), String::new()], Paint::Odd);
        table
    }

    fn at(width: usize) -> String {
        example().render(Screen { width: Some(width), colours: false })
    }

    #[test]
    fn with_room_everything_is_shown() {
        let text = at(200);
        assert_eq!(
            text,
            "GPU  NAME              LABEL   WHY\n  0  NVIDIA H100 80GB  rack 7  all GPUs are promised to others\n  1  日本�[2J\n"
        );
        assert_eq!(example().render(Screen { width: None, colours: false }), text);
    }

    #[test]
    fn without_room_texts_are_cut_then_columns_are_left_out() {
        assert_eq!(
            at(45),
            format!(
                "GPU  NAME              LABEL   WHY\n  0  NVIDIA H100 80GB  rack 7  all GPUs are\n{0}promised to\n{0}others\n  1  日本�[2J\n",
                " ".repeat(31)
            )
        );
        assert!(at(40).contains("NVIDIA H100 80…  rack 7"), "{}", at(40));
        let narrow = at(24);
        assert!(!narrow.contains("LABEL") && narrow.contains("others"), "{narrow}");
        for width in 24..80 {
            assert!(at(width).lines().all(|line| columns(line) <= width), "{width}:\n{}", at(width));
        }
    }

    #[test]
    fn colours_are_around_whole_lines_and_only_where_wanted() {
        let text = example().render(Screen { width: Some(200), colours: true });
        assert!(text.contains("\n\x1b[33m  1  日本�[2J\x1b[0m\n"), "{text}");
        assert!(!at(200).contains('\x1b'));
    }
}
