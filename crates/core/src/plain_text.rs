//! Plain text: names that a terminal, a log and a page show as they are.
//!
//! Control characters move the cursor of a terminal and split lines of a log. Bidirectional and zero-width characters let one
//! name look like another.

use std::borrow::Cow;
use std::fmt::Write;

use crate::request::FieldError;

/// Whether a character is shown as itself: it is no control, bidirectional, zero-width or other invisible character.
pub fn is_plain(c: char) -> bool {
    let is_hidden_or_bidi = matches!(c,
        '\u{ad}' | '\u{34f}' | '\u{61c}' | '\u{180e}' | '\u{200b}'..='\u{200f}' | '\u{2028}'..='\u{202e}'
        | '\u{2060}'..='\u{206f}' | '\u{feff}' | '\u{fff9}'..='\u{fffb}' | '\u{e0000}'..='\u{e0fff}');
    !c.is_control() && !is_hidden_or_bidi
}

/// Refuses text that is not plain. The error names its characters as `<U+202E>`.
pub fn check_plain_text(field: &'static str, text: &str) -> Result<(), FieldError> {
    if text.chars().all(is_plain) {
        return Ok(());
    }
    let allowed = "text without control, bidirectional and zero-width characters";
    Err(FieldError::new(field, escape_text(text), allowed))
}

/// Returns the text with `<U+202E>` in place of each character that is not plain.
pub fn escape_text(text: &str) -> Cow<'_, str> {
    if text.chars().all(is_plain) {
        return text.into();
    }
    let mut escaped = String::with_capacity(text.len() + 8);
    for c in text.chars() {
        if is_plain(c) {
            escaped.push(c);
        } else {
            // Writing to a string cannot fail.
            let _ = write!(escaped, "<U+{:04X}>", u32::from(c));
        }
    }
    escaped.into()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn hidden_characters_are_named_and_others_stay() {
        for text in ["alice", "Zoë", "日本", "a b", "שלום", "🙂", "<U+202E>", ""] {
            assert!(matches!(escape_text(text), Cow::Borrowed(same) if same == text), "{text}");
            assert_eq!(check_plain_text("owner", text), Ok(()));
        }
        for (text, escaped) in [
            ("bo\u{202e}b", "bo<U+202E>b"),
            ("a\nb", "a<U+000A>b"),
            ("\u{1b}[31m", "<U+001B>[31m"),
            ("ali\u{200b}ce", "ali<U+200B>ce"),
            ("\u{feff}x\u{9b}", "<U+FEFF>x<U+009B>"),
            ("\u{e0041}", "<U+E0041>"),
        ] {
            assert_eq!(escape_text(text), escaped);
            let error = check_plain_text("owner", text).unwrap_err();
            assert_eq!((error.field, error.value.as_str()), ("owner", escaped));
        }
    }
}
