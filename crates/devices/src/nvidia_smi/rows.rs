//! Comma separated rows under a line of field names, as `--format=csv` prints them.

use crate::limits;
use crate::source::SourceError;
use crate::told::words;

/// A field of the head: `memory.total [MiB]`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Field {
    /// Its name, in lower case.
    pub(crate) name: String,
    /// Its unit, where the head gives one.
    pub(crate) unit: Option<String>,
}

impl Field {
    /// A cell of this field with its unit: its own, that of the head, or else the `usual` one.
    pub(crate) fn with_unit(&self, cell: &str, usual: &str) -> String {
        let unit = self.unit.as_deref().unwrap_or(usual);
        let is_bare = !unit.is_empty() && cell.parse::<f64>().is_ok();
        if is_bare { format!("{cell} {unit}") } else { cell.to_owned() }
    }
}

/// The rows of a text and what their cells are.
#[derive(Debug, Default)]
pub(crate) struct Rows {
    pub(crate) fields: Vec<Field>,
    /// The cells of each row, as many as there are fields or, where a row is cut off, fewer.
    pub(crate) rows: Vec<Vec<String>>,
    /// What is wrong with single rows.
    pub(crate) warnings: Vec<String>,
}

impl Rows {
    /// Reads a text; a row that has too many commas has them in the field `free`, which holds any text.
    pub(crate) fn parse(text: &str, format: &'static str, free: &[&str]) -> Result<Self, SourceError> {
        let mut lines = text.lines().map(str::trim).filter(|line| !line.is_empty());
        let Some(head) = lines.next() else {
            return Err(SourceError::malformed(format, "it is empty"));
        };
        let Some(fields) = fields(head) else {
            let problem = "its first line holds no field names, so its cells cannot be told apart; print it with \
                           --format=csv, without noheader";
            return Err(SourceError::malformed(format, problem));
        };
        let separator = separator(head);
        let free = fields.iter().position(|field| free.contains(&field.name.as_str()));
        let mut rows = Self { fields, ..Self::default() };
        for line in lines.filter(|line| *line != head) {
            let mut cells = cells(line, separator);
            let wanted = rows.fields.len();
            if cells.len() > wanted {
                match free {
                    Some(free) => {
                        let surplus = cells.len() - wanted;
                        let joined = cells.drain(free..=free + surplus).collect::<Vec<_>>().join(", ");
                        cells.insert(free, joined);
                    }
                    None => {
                        rows.warnings.push(format!("{} cells under {wanted} names: {}", cells.len(), words(line)));
                        cells.truncate(wanted);
                    }
                }
            }
            if cells.len() < wanted {
                rows.warnings.push(format!("{} cells under {wanted} names: {}", cells.len(), words(line)));
                // The last one may be cut off as well.
                cells.pop();
            }
            rows.rows.push(cells);
        }
        rows.leave_out_a_cut_number(text);
        rows.warnings.truncate(limits::WARNINGS);
        Ok(rows)
    }

    /// Leaves out the last number of a text that ends in it where it lacks the unit that others have: `81` of `81559 MiB`.
    fn leave_out_a_cut_number(&mut self, text: &str) {
        let with_units = self.fields.iter().map(|field| field.unit.is_some()).collect::<Vec<_>>();
        let in_columns = |row: &Vec<String>, is: fn(&str) -> bool| {
            row.iter().zip(&with_units).any(|(cell, has_unit)| *has_unit && is(cell))
        };
        let has_unit = |cell: &str| cell.starts_with(|c: char| c.is_ascii_digit()) && cell.contains(' ');
        let others_have = self.rows.iter().any(|row| in_columns(row, has_unit));
        let Some(last) = self.rows.last_mut().filter(|row| row.len() == with_units.len()) else { return };
        let is_bare = last.last().is_some_and(|cell| cell.parse::<f64>().is_ok()) && with_units.last() == Some(&true);
        if others_have && is_bare && !text.ends_with('\n') {
            let cut = last.pop().unwrap_or_default();
            self.warnings.push(format!("the table ends early: {}", words(&cut)));
        }
    }

    /// The cell of a row under any of these names; the first that there is.
    pub(crate) fn cell<'a>(&self, row: &'a [String], names: &[&str]) -> Option<&'a str> {
        self.cell_and_field(row, names).map(|(cell, _)| cell)
    }

    /// The same with its field.
    pub(crate) fn cell_and_field<'a>(&self, row: &'a [String], names: &[&str]) -> Option<(&'a str, &Field)> {
        let place = names.iter().find_map(|name| self.fields.iter().position(|field| field.name == *name))?;
        Some((row.get(place)?, self.fields.get(place)?))
    }
}

/// The field names of a line, where it holds nothing else.
pub(crate) fn fields(line: &str) -> Option<Vec<Field>> {
    let field = |cell: String| {
        let (name, unit) = match cell.split_once('[') {
            Some((name, unit)) => (name.trim(), Some(unit.trim_end_matches(']').trim().to_owned())),
            None => (cell.as_str(), None),
        };
        let begins = name.starts_with(|c: char| c.is_ascii_alphabetic());
        let is_name = begins && name.chars().all(|c| c.is_ascii_alphanumeric() || matches!(c, '.' | '_'));
        is_name.then(|| Field { name: name.to_ascii_lowercase(), unit })
    };
    cells(line, separator(line)).into_iter().map(field).collect()
}

/// What parts the cells below a head: a comma, unless a spreadsheet made it something else.
fn separator(head: &str) -> char {
    [',', ';', '\t'].into_iter().find(|separator| head.contains(*separator)).unwrap_or(',')
}

/// The cells of a line; one in quotes may hold separators.
fn cells(line: &str, separator: char) -> Vec<String> {
    let mut cells = Vec::new();
    let mut rest = line.trim();
    loop {
        let quoted = rest.strip_prefix('"').and_then(|inner| inner.split_once('"'));
        let (cell, after) = match quoted {
            Some((cell, after)) if after.is_empty() || after.trim_start().starts_with(separator) => {
                (cell, after.trim_start().strip_prefix(separator))
            }
            _ => rest.split_once(separator).map_or((rest, None), |(cell, after)| (cell, Some(after))),
        };
        cells.push(cell.trim().to_owned());
        match after {
            Some(after) => rest = after.trim_start_matches(' '),
            None => return cells,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn commas_in_names_stay_in_them() {
        let text = "pid, process_name, used_memory [MiB]\n1, a, b, c, 5 MiB\n2, \"x, y\", 6 MiB\n3, cut o";
        let rows = Rows::parse(text, "csv", &["process_name"]).unwrap();
        assert_eq!(rows.rows[0], ["1", "a, b, c", "5 MiB"]);
        assert_eq!(rows.rows[1], ["2", "x, y", "6 MiB"]);
        assert_eq!(rows.rows[2], ["3"]);
        assert_eq!(rows.warnings.len(), 1);
        assert_eq!(rows.fields[2].unit.as_deref(), Some("MiB"));
        assert_eq!(rows.cell(&rows.rows[0], &["gone", "pid"]), Some("1"));
    }

    #[test]
    fn a_first_line_of_values_is_no_head() {
        for values in ["0, NVIDIA A10, 5 MiB", "GPU-1234, 5", "", "2004, 44", "[N/A], x"] {
            assert_eq!(fields(values), None, "{values}");
        }
        assert!(fields("index, memory.total [MiB]").is_some());
    }
}
