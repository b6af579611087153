//! Tables of text: cells under the columns of a header, and square tables between devices.

use crate::address;

/// Devices a square table may have.
const SIDE: usize = 1024;
/// Square tables read of one text.
const SQUARES: usize = 64;

/// A text without the codes a terminal takes for colours and slanted letters.
pub(crate) fn without_codes(text: &str) -> String {
    let mut out = String::with_capacity(text.len());
    let mut rest = text;
    while let Some(at) = rest.find('\u{1b}') {
        out.push_str(&rest[..at]);
        rest = &rest[at + 1..];
        if let Some(code) = rest.strip_prefix('[') {
            let end = code.find(|c: char| c.is_ascii_alphabetic() || c == '\n').map_or(code.len(), |end| end + 1);
            rest = &code[end..];
        }
    }
    out.push_str(rest);
    out
}

/// A cell and the characters of the line it covers.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Cell<'a> {
    /// What is in it.
    pub text: &'a str,
    /// First character.
    pub start: usize,
    /// One past the last.
    pub end: usize,
}

/// The cells of a line, which are at least two blanks or a tab apart.
pub(crate) fn cells(line: &str) -> Vec<Cell<'_>> {
    let mut found: Vec<Cell> = Vec::new();
    let mut words = words_of(line).peekable();
    let (mut bytes, mut chars) = (0, 0);
    while let Some(first) = words.next() {
        let mut last = first;
        while let Some(&next) = words.peek() {
            let gap = line.get(last.1..next.0).unwrap_or_default();
            if gap != " " {
                break;
            }
            last = next;
            words.next();
        }
        let text = line.get(first.0..last.1).unwrap_or_default();
        let start = chars + line.get(bytes..first.0).unwrap_or_default().chars().count();
        (bytes, chars) = (last.1, start + text.chars().count());
        found.push(Cell { text, start, end: chars });
    }
    found
}

/// The words of a line, by their bytes.
fn words_of(line: &str) -> impl Iterator<Item = (usize, usize)> {
    let place = move |word: &str| word.as_ptr() as usize - line.as_ptr() as usize;
    line.split_whitespace().map(move |word| (place(word), place(word) + word.len()))
}

/// Which edge of a column its cells keep to.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Edge {
    /// They begin where the header begins, or later.
    Left,
    /// They end where the header ends, or before.
    Right,
}

/// Which column a cell stands in.
pub(crate) fn column_of(header: &[Cell<'_>], cell: Cell<'_>, edge: Edge) -> Option<usize> {
    match edge {
        Edge::Left => header.iter().rposition(|column| column.start <= cell.start),
        Edge::Right => header.iter().position(|column| column.end >= cell.end),
    }
}

/// The cells of a row with the numbers of their columns: by count where it fits, else by place.
pub(crate) fn row<'a>(header: &[Cell<'_>], line: &'a str, edge: Edge) -> Vec<(usize, Cell<'a>)> {
    let cells = cells(line);
    if cells.len() == header.len() {
        return cells.into_iter().enumerate().collect();
    }
    cells.into_iter().filter_map(|cell| Some((column_of(header, cell, edge)?, cell))).collect()
}

/// A square table between devices.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(crate) struct Square {
    /// Its title, in small letters.
    pub title: String,
    /// What the devices are called: places on the bus or `GPU0`.
    pub names: Vec<String>,
    /// Each row, in the order of the devices as far as it goes.
    pub rows: Vec<Vec<String>>,
}

/// All square tables of a text, each under its title.
pub(crate) fn squares(text: &str) -> Vec<Square> {
    let mut found: Vec<Square> = Vec::new();
    let mut open = false;
    for line in text.lines() {
        let words: Vec<&str> = line.split_whitespace().take(SIDE + 1).collect();
        if let Some(title) = title_of(line) {
            if found.len() >= SQUARES {
                break;
            }
            found.push(Square { title, ..Square::default() });
            open = true;
            continue;
        }
        let Some(table) = found.last_mut().filter(|_| open) else { continue };
        let Some((&first, rest)) = words.split_first() else {
            open = table.names.is_empty();
            continue;
        };
        if table.names.is_empty() && words.iter().all(|word| is_device(word)) {
            table.names = words.iter().map(|word| (*word).to_owned()).collect();
        } else if is_device(first) && table.rows.len() < table.names.len() {
            table.rows.push(rest.iter().map(|word| (*word).to_owned()).collect());
        } else {
            // Complaints may stand between a title and its table.
            open = table.names.is_empty() && !first.starts_with('=');
        }
    }
    found.retain(|table| !table.names.is_empty());
    found
}

/// `HOPS TABLE:` of amd-smi, `=== Hops between two GPUs ===` of rocm-smi.
fn title_of(line: &str) -> Option<String> {
    let title = line.trim().trim_matches('=').trim();
    let is_title = title.ends_with(" TABLE:") || title.contains("between two GPUs");
    is_title.then(|| title.to_ascii_lowercase())
}

fn is_device(word: &str) -> bool {
    let number = word.strip_prefix("GPU").is_some_and(|digits| digits.parse::<u32>().is_ok());
    number || word.contains(':') && address::parse(word).is_some()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn texts<'a>(cells: &[Cell<'a>]) -> Vec<&'a str> {
        cells.iter().map(|cell| cell.text).collect()
    }

    #[test]
    fn cells_are_two_blanks_apart() {
        let found = cells("0       [0x74a0 : 0x00]   40.0°C  a\tb");
        assert_eq!(texts(&found), ["0", "[0x74a0 : 0x00]", "40.0°C", "a", "b"]);
        assert_eq!((found[3].start, found[3].end), (34, 35));
    }

    #[test]
    fn a_row_with_more_or_fewer_cells_goes_by_place() {
        let header = cells("IDs            Temp    Power");
        let left = row(&header, "0x1,   77      43.0C   N/A, N/A  x", Edge::Left);
        assert_eq!(left.iter().map(|(column, _)| *column).collect::<Vec<_>>(), [0, 0, 1, 2, 2]);
        let header = cells("GPU  POWER  GPU_TEMP");
        let right = row(&header, "  0            55 °C", Edge::Right);
        assert_eq!(right.iter().map(|(column, _)| *column).collect::<Vec<_>>(), [0, 2]);
    }

    #[test]
    fn terminal_codes_are_no_text() {
        assert_eq!(without_codes("a\u{1b}[3m b\u{1b}[0m\u{1b}"), "a b");
    }

    #[test]
    fn square_tables_are_found_under_their_titles() {
        let text =
            "HOPS TABLE:\nERROR: GPU[1]: no\n      GPU0 GPU1\nGPU0  0    1\nGPU1  1    0\n\nLegend:\n SELF = x\n";
        let found = squares(text);
        assert_eq!(found.len(), 1);
        assert_eq!(found[0].title, "hops table:");
        assert_eq!(found[0].rows, [["0", "1"], ["1", "0"]]);
    }
}
