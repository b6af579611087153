//! A command as a script for `sh`, which finds its arguments in variables: nothing in them is ever read as a command.

use super::replacement::{Replacement, Which};
use super::shell::{Quotes, quote};
use super::{Piece, text};

/// The variable that tells a command the number of its worker, from 1.
pub(in crate::map) const SLOT: &str = "GPUPOOL_SLOT";

/// What is executed to run this text by `sh`.
pub(super) fn words(pieces: &[Piece], sources: usize) -> Vec<Vec<Piece>> {
    let mut parameters: Vec<Replacement> = Vec::new();
    let mut body = Vec::new();
    for piece in pieces {
        match piece {
            Piece::Text(text) => body.extend(text),
            Piece::Argument(replacement, quotes) => {
                for (nth, one) in each(*replacement, sources).into_iter().enumerate() {
                    if nth > 0 {
                        body.push(b' ');
                    }
                    refer(&variable(one, &mut parameters), *quotes, &mut body);
                }
            }
        }
    }
    let mut script = named(parameters.len()).into_bytes();
    script.extend(body);
    let mut words = vec![text("sh"), text("-c"), vec![Piece::Text(script)], text("sh")];
    words.extend(parameters.into_iter().map(|one| vec![Piece::Argument(one, Quotes::None)]));
    words
}

/// Words as a person would type them.
pub(super) fn shown(words: &[Vec<Piece>]) -> Vec<Piece> {
    let mut shown = Vec::new();
    for (nth, word) in words.iter().enumerate() {
        if nth > 0 {
            shown.push(Piece::Text(b" ".to_vec()));
        }
        if word.is_empty() {
            shown.push(Piece::Text(b"''".to_vec()));
        }
        shown.extend(word.iter().map(|piece| match piece {
            Piece::Text(text) => {
                let mut quoted = Vec::new();
                quote(text, Quotes::None, &mut quoted);
                Piece::Text(quoted)
            }
            argument => argument.clone(),
        }));
    }
    shown
}

/// One for each argument it means.
fn each(replacement: Replacement, sources: usize) -> Vec<Replacement> {
    match replacement.which {
        Which::All => (0..sources).map(|nth| Replacement { which: Which::Source(nth), ..replacement }).collect(),
        _ => vec![replacement],
    }
}

fn variable(one: Replacement, parameters: &mut Vec<Replacement>) -> String {
    if one.which == Which::Slot {
        return SLOT.into();
    }
    let known = parameters.iter().position(|parameter| *parameter == one);
    let nth = known.unwrap_or_else(|| {
        parameters.push(one);
        parameters.len() - 1
    });
    format!("gpupool_{}", nth + 1)
}

fn refer(variable: &str, quotes: Quotes, body: &mut Vec<u8>) {
    let reference = match quotes {
        Quotes::None | Quotes::Verbatim => format!("\"${variable}\""),
        Quotes::Double => format!("${{{variable}}}"),
        Quotes::Single => format!("'\"${variable}\"'"),
    };
    body.extend(reference.into_bytes());
}

/// Gives the parameters names of their own: `$1` is another one within a function.
fn named(parameters: usize) -> String {
    if parameters == 0 {
        return String::new();
    }
    let names: String = (1..=parameters).map(|nth| format!("gpupool_{nth}=${{{nth}}} ")).collect();
    format!("{}; shift {parameters}; ", names.trim_end())
}
