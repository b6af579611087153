//! Tables for people, fitted to the terminal: texts are shortened down to a least width, then columns that matter least are
//! left out, and the last column may go on in the lines below.

use crate::terminal::{Paint, Screen};
use crate::text::{clean, columns, cut, wrap};

/// Between two columns.
const GAP: &str = "  ";

/// A column of a table.
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

/// A table.
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

#[cfg(test)]
mod tests {
    use super::*;

    fn table() -> Table<4> {
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
        table().render(Screen { width: Some(width), colours: false })
    }

    #[test]
    fn with_room_everything_is_shown() {
        let text = at(200);
        assert_eq!(
            text,
            "GPU  NAME              LABEL   WHY\n  0  NVIDIA H100 80GB  rack 7  all GPUs are promised to others\n  1  日本�[2J\n"
        );
        assert_eq!(table().render(Screen { width: None, colours: false }), text);
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
        let text = table().render(Screen { width: Some(200), colours: true });
        assert!(text.contains("\n\x1b[33m  1  日本�[2J\x1b[0m\n"), "{text}");
        assert!(!at(200).contains('\x1b'));
    }
}
