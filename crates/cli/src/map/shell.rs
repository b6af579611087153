//! POSIX shell syntax: which quotes are open at a position, whether a text consists of plain words, and how to quote an
//! argument.

use std::ffi::OsString;
use std::process::{Command, Stdio};

use super::template::{ReplacementString, ReplacementValue, TemplatePiece};
use crate::output::UsageError;
use crate::program::check_program;

/// Quotes around a position.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum QuoteContext {
    None,
    Single,
    Double,
    /// No quoting: the argument is shell text itself.
    Verbatim,
}

/// Construct that is open at a position of a shell text.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum ShellContext {
    Single,
    Double,
    /// `( … )` and `$( … )`; quoting starts anew inside.
    Parenthesis,
    Backquote,
    Arithmetic,
    /// `${ … }`.
    Parameter,
}

/// Interpretation of a text.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum TextSyntax {
    /// Word that no shell interprets.
    Word,
    /// Shell text.
    Shell,
}

/// Splits a text into literal text and replacement strings with their quotes.
pub(super) fn parse_pieces(text: &[u8], syntax: TextSyntax) -> Result<Vec<TemplatePiece>, UsageError> {
    let mut pieces = Vec::new();
    let mut open: Vec<ShellContext> = Vec::new();
    let (mut at, mut text_from) = (0, 0);
    while at < text.len() {
        let rest = &text[at..];
        if let Some((replacement, length)) = ReplacementString::parse_prefix(rest) {
            let quotes = quote_context(&open)?;
            if text_from < at {
                pieces.push(TemplatePiece::Text(text[text_from..at].to_vec()));
            }
            pieces.push(TemplatePiece::Argument(replacement, quotes));
            at += length;
            text_from = at;
        } else {
            at += if syntax == TextSyntax::Shell { advance(rest, &mut open) } else { 1 };
        }
    }
    if text_from < text.len() {
        pieces.push(TemplatePiece::Text(text[text_from..].to_vec()));
    }
    Ok(pieces)
}

fn quote_context(open: &[ShellContext]) -> Result<QuoteContext, UsageError> {
    let within = |place, instead| {
        let what = "a replacement string such as {} cannot be used within";
        Err(UsageError::new(format_args!("COMMAND: {what} {place}: {instead}")))
    };
    match open.last() {
        None | Some(ShellContext::Parenthesis) => Ok(QuoteContext::None),
        Some(ShellContext::Single) => Ok(QuoteContext::Single),
        Some(ShellContext::Double) => Ok(QuoteContext::Double),
        Some(ShellContext::Backquote) => within("`…`", "write $(…)"),
        Some(ShellContext::Arithmetic | ShellContext::Parameter) => {
            within("$((…)) or ${…}", "assign it to a variable first, as in x={}; echo $((x+1))")
        }
    }
}

/// Consumes one token and updates the open constructs. Returns its length.
fn advance(rest: &[u8], open: &mut Vec<ShellContext>) -> usize {
    let top = open.last().copied();
    if top == Some(ShellContext::Single) {
        if rest[0] == b'\'' {
            open.pop();
        }
        return 1;
    }
    let in_double = top == Some(ShellContext::Double);
    match rest {
        [b'\\', _, ..] => return 2,
        [b'$', b'(', b'(', ..] => {
            open.push(ShellContext::Arithmetic);
            return 3;
        }
        [b'$', b'(', ..] => {
            open.push(ShellContext::Parenthesis);
            return 2;
        }
        [b'$', b'{', ..] => {
            open.push(ShellContext::Parameter);
            return 2;
        }
        [b')', b')', ..] if top == Some(ShellContext::Arithmetic) => {
            open.pop();
            return 2;
        }
        [b'}', ..] if top == Some(ShellContext::Parameter) => drop(open.pop()),
        [b')', ..] if top == Some(ShellContext::Parenthesis) => drop(open.pop()),
        [b'(', ..] if !in_double && top != Some(ShellContext::Arithmetic) => open.push(ShellContext::Parenthesis),
        [b'`', ..] if top == Some(ShellContext::Backquote) => drop(open.pop()),
        [b'`', ..] => open.push(ShellContext::Backquote),
        [b'"', ..] if in_double => drop(open.pop()),
        [b'"', ..] => open.push(ShellContext::Double),
        [b'\'', ..] if !in_double => open.push(ShellContext::Single),
        _ => {}
    }
    1
}

/// Quotes an argument so that the shell takes it literally.
pub(super) fn quote_argument(argument: &[u8], quotes: QuoteContext) -> Vec<u8> {
    match quotes {
        QuoteContext::Verbatim => argument.to_vec(),
        QuoteContext::None if !argument.is_empty() && argument.iter().copied().all(is_plain_byte) => argument.to_vec(),
        QuoteContext::None => [b"'", quote_argument(argument, QuoteContext::Single).as_slice(), b"'"].concat(),
        QuoteContext::Single => argument.split(|byte| *byte == b'\'').collect::<Vec<_>>().join(b"'\\''".as_slice()),
        QuoteContext::Double => {
            let escape = |byte: &u8| matches!(byte, b'"' | b'$' | b'`' | b'\\').then_some(b'\\');
            argument.iter().flat_map(|byte| escape(byte).into_iter().chain([*byte])).collect()
        }
    }
}

/// Returns whether the byte has no special meaning to a shell.
const fn is_plain_byte(byte: u8) -> bool {
    matches!(byte, b'a'..=b'z' | b'A'..=b'Z' | b'0'..=b'9' | b'_' | b'-' | b'.' | b'/' | b',' | b':' | b'@' | b'%' | b'+' | b'=')
}

/// Splits a text into words if a shell would only split it at blanks and run the program that is its first word. `None`
/// if the text needs a shell.
pub(super) fn plain_words(pieces: &[TemplatePiece]) -> Option<Vec<Vec<TemplatePiece>>> {
    let mut words: Vec<Vec<TemplatePiece>> = Vec::new();
    let mut in_word = false;
    for piece in pieces {
        match piece {
            TemplatePiece::Argument(replacement, _) => {
                if replacement.value == ReplacementValue::Slot {
                    return None;
                }
                if !in_word {
                    words.push(Vec::new());
                }
                words.last_mut()?.push(piece.clone());
                in_word = true;
            }
            TemplatePiece::Text(text) => {
                for (nth, part) in text.split(|byte| matches!(byte, b' ' | b'\t')).enumerate() {
                    in_word = in_word && nth == 0;
                    if part.is_empty() {
                        continue;
                    }
                    if !part.iter().copied().all(is_plain_byte) {
                        return None;
                    }
                    if !in_word {
                        words.push(Vec::new());
                    }
                    words.last_mut()?.push(TemplatePiece::Text(part.to_vec()));
                    in_word = true;
                }
            }
        }
    }
    let [TemplatePiece::Text(program)] = words.first()?.as_slice() else { return None };
    let program = std::str::from_utf8(program).ok()?;
    (!program.contains('=') && !SHELL_BUILTINS.contains(&program) && is_executable_in_path(program)).then_some(words)
}

/// Shell builtins that differ from the programs of the same name.
const SHELL_BUILTINS: [&str; 10] = ["cd", "command", "echo", "exec", "kill", "printf", "pwd", "read", "time", "umask"];

fn is_executable_in_path(program: &str) -> bool {
    check_program(program.as_ref()).is_ok()
}

/// Checks that the first word of a command is a program or known to the shell, if it is a plain word.
pub(super) fn check_command(command: &[OsString]) -> Result<(), UsageError> {
    let Some(first) = command.first().and_then(|word| word.to_str()) else { return Ok(()) };
    let program = first.split([' ', '\t']).next().unwrap_or_default();
    if program.is_empty() || program.contains('=') || !program.bytes().all(is_plain_byte) {
        return Ok(());
    }
    let Err(error) = check_program(program.as_ref()) else { return Ok(()) };
    let known = Command::new("sh").args(["-c", "command -v -- \"$1\"", "sh", program]).stdin(Stdio::null()).output();
    match known {
        Ok(output) if !output.status.success() => Err(UsageError::new(error)),
        _ => Ok(()),
    }
}
