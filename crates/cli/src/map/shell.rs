//! What a POSIX shell would make of a text: where in it quotes are open, whether it is only plain words, and how to write an
//! argument so that the shell takes it as it is.

use super::template::{Piece, Replacement, Which};
use crate::output::WrongUsage;

/// In which quotes something stands.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Quotes {
    None,
    Single,
    Double,
    /// It is a text for the shell by itself.
    Verbatim,
}

/// What is open around a place in a shell text.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Open {
    Single,
    Double,
    /// `( … )` and `$( … )`: quotes begin anew within.
    Parenthesis,
    Backquote,
    Arithmetic,
    /// `${ … }`.
    Parameter,
}

/// How a text is read.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Syntax {
    /// As a word that no shell sees.
    Word,
    /// As a text for a shell.
    Shell,
}

/// The pieces of a text, and in which quotes each replacement string stands.
pub(super) fn pieces(text: &[u8], syntax: Syntax) -> Result<Vec<Piece>, WrongUsage> {
    let mut pieces = Vec::new();
    let mut open: Vec<Open> = Vec::new();
    let (mut at, mut text_from) = (0, 0);
    while at < text.len() {
        let rest = &text[at..];
        if let Some((replacement, length)) = Replacement::at(rest) {
            let quotes = quotes(&open)?;
            if text_from < at {
                pieces.push(Piece::Text(text[text_from..at].to_vec()));
            }
            pieces.push(Piece::Argument(replacement, quotes));
            at += length;
            text_from = at;
        } else {
            at += if syntax == Syntax::Shell { step(rest, &mut open) } else { 1 };
        }
    }
    if text_from < text.len() {
        pieces.push(Piece::Text(text[text_from..].to_vec()));
    }
    Ok(pieces)
}

fn quotes(open: &[Open]) -> Result<Quotes, WrongUsage> {
    let within = |place, instead| {
        let what = "a replacement string such as {} cannot stand within";
        Err(WrongUsage::of(format_args!("COMMAND: {what} {place}: {instead}")))
    };
    match open.last() {
        None | Some(Open::Parenthesis) => Ok(Quotes::None),
        Some(Open::Single) => Ok(Quotes::Single),
        Some(Open::Double) => Ok(Quotes::Double),
        Some(Open::Backquote) => within("`…`", "write $(…)"),
        Some(Open::Arithmetic | Open::Parameter) => {
            within("$((…)) or ${…}", "give it a name before, as in x={}; echo $((x+1))")
        }
    }
}

/// Goes on by one sign, or by several that belong together.
fn step(rest: &[u8], open: &mut Vec<Open>) -> usize {
    let top = open.last().copied();
    if top == Some(Open::Single) {
        if rest[0] == b'\'' {
            open.pop();
        }
        return 1;
    }
    let in_double = top == Some(Open::Double);
    match rest {
        [b'\\', _, ..] => return 2,
        [b'$', b'(', b'(', ..] => {
            open.push(Open::Arithmetic);
            return 3;
        }
        [b'$', b'(', ..] => {
            open.push(Open::Parenthesis);
            return 2;
        }
        [b'$', b'{', ..] => {
            open.push(Open::Parameter);
            return 2;
        }
        [b')', b')', ..] if top == Some(Open::Arithmetic) => {
            open.pop();
            return 2;
        }
        [b'}', ..] if top == Some(Open::Parameter) => drop(open.pop()),
        [b')', ..] if top == Some(Open::Parenthesis) => drop(open.pop()),
        [b'(', ..] if !in_double && top != Some(Open::Arithmetic) => open.push(Open::Parenthesis),
        [b'`', ..] if top == Some(Open::Backquote) => drop(open.pop()),
        [b'`', ..] => open.push(Open::Backquote),
        [b'"', ..] if in_double => drop(open.pop()),
        [b'"', ..] => open.push(Open::Double),
        [b'\'', ..] if !in_double => open.push(Open::Single),
        _ => {}
    }
    1
}

/// An argument, written so that a shell takes it as it is.
pub(super) fn quote(argument: &[u8], quotes: Quotes) -> Vec<u8> {
    match quotes {
        Quotes::Verbatim => argument.to_vec(),
        Quotes::None if !argument.is_empty() && argument.iter().copied().all(is_plain) => argument.to_vec(),
        Quotes::None => [b"'", quote(argument, Quotes::Single).as_slice(), b"'"].concat(),
        Quotes::Single => argument.split(|byte| *byte == b'\'').collect::<Vec<_>>().join(b"'\\''".as_slice()),
        Quotes::Double => {
            let escape = |byte: &u8| matches!(byte, b'"' | b'$' | b'`' | b'\\').then_some(b'\\');
            argument.iter().flat_map(|byte| escape(byte).into_iter().chain([*byte])).collect()
        }
    }
}

/// Means only itself to a shell, wherever it stands in a word.
const fn is_plain(byte: u8) -> bool {
    matches!(byte, b'a'..=b'z' | b'A'..=b'Z' | b'0'..=b'9' | b'_' | b'-' | b'.' | b'/' | b',' | b':' | b'@' | b'%' | b'+' | b'=')
}

/// The words of a text that a shell would only take apart at its blanks, and whose first is a program and not something the
/// shell does itself; `None` where the text needs a shell.
pub(super) fn plain_words(pieces: &[Piece]) -> Option<Vec<Vec<Piece>>> {
    let mut words: Vec<Vec<Piece>> = Vec::new();
    let mut is_within = false;
    for piece in pieces {
        match piece {
            Piece::Argument(replacement, _) => {
                if replacement.which == Which::Slot {
                    return None;
                }
                if !is_within {
                    words.push(Vec::new());
                }
                words.last_mut()?.push(piece.clone());
                is_within = true;
            }
            Piece::Text(text) => {
                for (nth, part) in text.split(|byte| matches!(byte, b' ' | b'\t')).enumerate() {
                    is_within = is_within && nth == 0;
                    if part.is_empty() {
                        continue;
                    }
                    if !part.iter().copied().all(is_plain) {
                        return None;
                    }
                    if !is_within {
                        words.push(Vec::new());
                    }
                    words.last_mut()?.push(Piece::Text(part.to_vec()));
                    is_within = true;
                }
            }
        }
    }
    let [Piece::Text(program)] = words.first()?.as_slice() else { return None };
    let program = std::str::from_utf8(program).ok()?;
    (!program.contains('=') && !SHELLS_OWN.contains(&program) && is_in_path(program)).then_some(words)
}

/// What shells do themselves, and otherwise than the programs of the same name.
const SHELLS_OWN: [&str; 10] = ["cd", "command", "echo", "exec", "kill", "printf", "pwd", "read", "time", "umask"];

fn is_in_path(program: &str) -> bool {
    use rustix::fs::{Access, access};
    let can_run = |path: &std::path::Path| path.is_file() && access(path, Access::EXEC_OK).is_ok();
    if program.contains('/') {
        return can_run(program.as_ref());
    }
    let path = std::env::var_os("PATH").unwrap_or_default();
    std::env::split_paths(&path).any(|dir| can_run(&dir.join(program)))
}
