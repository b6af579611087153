//! Text that comes from elsewhere (names of people, processes and devices), made fit to be shown on a terminal, and cut to a
//! number of columns. Nothing that moves the cursor, changes the direction of writing or hides gets through.

use unicode_width::UnicodeWidthChar;

/// No text from elsewhere is shown longer than this.
const SHOWN_CHARS: usize = 2_000;

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
}
