//! A command with replacement strings, made into the command of each task.
//!
//! Several words are executed as they are, without a shell. One text is for the shell, with the arguments handed to it beside
//! the text, so that nothing in them can be taken for a command; where the text is only a program and plain words, the
//! program is executed directly, which means the same and is faster.

mod replacement;
mod script;
mod shell;

use std::ffi::OsString;
use std::fmt;
use std::os::unix::ffi::{OsStrExt, OsStringExt};

use bytes::Bytes;

pub(super) use script::SLOT;

use replacement::{Replacement, Which};
use shell::Quotes;

/// What is run for each task.
#[derive(Debug)]
pub(super) struct Template {
    /// What is executed.
    words: Vec<Vec<Piece>>,
    /// What a person would type into a shell for it.
    shown: Vec<Piece>,
}

/// A piece of a command.
#[derive(Debug, Clone, PartialEq, Eq)]
enum Piece {
    Text(Vec<u8>),
    Argument(Replacement, Quotes),
}

/// What is wrong with a command.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum TemplateError {
    /// An argument cannot stand there.
    Within { place: &'static str, instead: &'static str },
    /// There are not so many sources.
    NoSuchSource { number: usize, sources: usize },
}

impl fmt::Display for TemplateError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Within { place, instead } => {
                write!(f, "COMMAND: a replacement string such as {{}} cannot stand within {place}: {instead}")
            }
            Self::NoSuchSource { number, sources } => {
                write!(f, "COMMAND: {{{number}}} means source {number} of arguments; allowed are 1 to {sources} here")
            }
        }
    }
}

impl Template {
    /// The command with so many sources of arguments.
    pub fn parse(command: &[OsString], sources: usize) -> Result<Self, TemplateError> {
        let (words, shown) = match command {
            [] => {
                let line = Piece::Argument(Replacement::ALL, Quotes::Verbatim);
                (vec![text("sh"), text("-c"), vec![line.clone()]], vec![line])
            }
            [one] => {
                let mut pieces = shell::pieces(one.as_bytes())?;
                if !pieces.iter().any(|piece| matches!(piece, Piece::Argument(..))) {
                    pieces.push(Piece::Text(b" ".to_vec()));
                    pieces.push(Piece::Argument(Replacement::ALL, Quotes::None));
                }
                (shell::plain_words(&pieces).unwrap_or_else(|| script::words(&pieces, sources)), pieces)
            }
            several => {
                let mut words: Vec<Vec<Piece>> = several.iter().map(|word| pieces_of(word.as_bytes())).collect();
                if !words.iter().flatten().any(|piece| matches!(piece, Piece::Argument(..))) {
                    words.push(vec![Piece::Argument(Replacement::ALL, Quotes::None)]);
                }
                let shown = script::shown(&words);
                let knows_slot =
                    shown.iter().any(|piece| matches!(piece, Piece::Argument(one, _) if one.which == Which::Slot));
                (if knows_slot { script::words(&shown, sources) } else { words }, shown)
            }
        };
        check_sources(&shown, sources)?;
        Ok(Self { words, shown })
    }

    /// Program and arguments of a task.
    pub fn argv(&self, arguments: &[Bytes], seq: u64) -> Vec<OsString> {
        let mut argv = Vec::with_capacity(self.words.len() + arguments.len());
        for word in &self.words {
            let mut made = Vec::new();
            for piece in word {
                match piece {
                    Piece::Text(text) => made.extend(text),
                    Piece::Argument(replacement, Quotes::Verbatim) => made.extend(joined(*replacement, arguments, seq)),
                    // Several arguments are several words: the first goes on with what stands before, and so on.
                    Piece::Argument(replacement, _) => {
                        for (nth, value) in replacement.values(arguments, seq).iter().enumerate() {
                            if nth > 0 {
                                argv.push(OsString::from_vec(std::mem::take(&mut made)));
                            }
                            made.extend(value);
                        }
                    }
                }
            }
            argv.push(OsString::from_vec(made));
        }
        argv
    }

    /// What a person would type into a shell for it.
    pub fn shown(&self, arguments: &[Bytes], seq: u64) -> Vec<u8> {
        let mut shown = Vec::new();
        for piece in &self.shown {
            match piece {
                Piece::Text(text) => shown.extend(text),
                Piece::Argument(Replacement { which: Which::Slot, .. }, _) => shown.extend(b"{%}"),
                Piece::Argument(replacement, quotes) => {
                    for (nth, value) in replacement.values(arguments, seq).iter().enumerate() {
                        if nth > 0 {
                            shown.push(b' ');
                        }
                        shell::quote(value, *quotes, &mut shown);
                    }
                }
            }
        }
        shown
    }
}

/// What is executed for a worker, whose command has no replacement strings.
pub(super) fn worker_command(command: &[OsString]) -> Vec<OsString> {
    let [one] = command else { return command.to_vec() };
    let pieces = [Piece::Text(one.as_bytes().to_vec())];
    match shell::plain_words(&pieces) {
        Some(words) => Template { words, shown: Vec::new() }.argv(&[], 0),
        None => ["sh", "-c"].map(OsString::from).into_iter().chain([one.clone()]).collect(),
    }
}

fn joined(replacement: Replacement, arguments: &[Bytes], seq: u64) -> Vec<u8> {
    replacement.values(arguments, seq).join(&b' ')
}

fn text(text: &str) -> Vec<Piece> {
    vec![Piece::Text(text.into())]
}

/// The pieces of a word that no shell sees.
fn pieces_of(word: &[u8]) -> Vec<Piece> {
    let mut pieces = Vec::new();
    let (mut at, mut text_from) = (0, 0);
    while at < word.len() {
        let Some((replacement, length)) = Replacement::at(&word[at..]) else {
            at += 1;
            continue;
        };
        if text_from < at {
            pieces.push(Piece::Text(word[text_from..at].to_vec()));
        }
        pieces.push(Piece::Argument(replacement, Quotes::None));
        at += length;
        text_from = at;
    }
    if text_from < word.len() {
        pieces.push(Piece::Text(word[text_from..].to_vec()));
    }
    pieces
}

fn check_sources(pieces: &[Piece], sources: usize) -> Result<(), TemplateError> {
    for piece in pieces {
        if let Piece::Argument(Replacement { which: Which::Source(nth), .. }, _) = piece
            && *nth >= sources
        {
            return Err(TemplateError::NoSuchSource { number: nth + 1, sources });
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests;
