//! Values that are never shown, and the permission bits of the socket.

use std::fmt;

use serde_json::Value as Json;

use crate::raw::Raw;
use crate::value::Value;

/// What stands in the place of a secret.
pub(crate) const HIDDEN: &str = "(hidden)";

/// A text that is neither printed nor logged.
#[derive(Clone, PartialEq, Eq)]
pub struct Secret(String);

impl Secret {
    /// The text itself, for whoever must send it.
    pub fn expose(&self) -> &str {
        &self.0
    }
}

impl fmt::Debug for Secret {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(HIDDEN)
    }
}

impl Value for Secret {
    type Bounds = ();
    const SECRET: bool = true;

    /// It travels in a header, so it is one line of visible characters.
    fn read(raw: &Raw, (): &()) -> Option<Self> {
        let text = raw.text()?;
        (!text.is_empty() && text.chars().all(|c| c.is_ascii_graphic())).then(|| Self(text.to_owned()))
    }

    fn allowed((): &()) -> String {
        "a token as `gpupool token create` prints it, on one line without blanks".to_owned()
    }

    fn shown(&self) -> Json {
        HIDDEN.into()
    }
}

/// Permission bits of a file, written in octal.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct FileMode(pub u32);

impl Value for FileMode {
    type Bounds = ();

    /// A decimal number is refused: nobody can tell whether `660` was meant in octal.
    fn read(raw: &Raw, (): &()) -> Option<Self> {
        let bits = match raw {
            Raw::Octal(bits) => *bits,
            _ => {
                let text = raw.text()?;
                let digits = text.strip_prefix("0o").unwrap_or(text);
                u32::from_str_radix(digits, 8).ok().filter(|_| !digits.starts_with('+'))?
            }
        };
        (bits <= 0o777).then_some(Self(bits))
    }

    fn allowed((): &()) -> String {
        "permission bits in octal, in quotes: \"0600\", \"0660\" or \"0666\"".to_owned()
    }

    fn shown(&self) -> Json {
        format!("{:04o}", self.0).into()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn permission_bits_are_octal_and_a_decimal_number_is_refused() {
        let text = |text: &str| FileMode::read(&Raw::Text(text.into()), &());
        assert_eq!((text("0660"), text("660"), text("0o600")), tuple(0o660, 0o660, 0o600));
        assert_eq!(FileMode::read(&Raw::Octal(0o640), &()), Some(FileMode(0o640)));
        assert_eq!(FileMode::read(&Raw::Number("660".into()), &()), None);
        assert_eq!((text("0888"), text("7777"), text("+660")), (None, None, None));
    }

    fn tuple(a: u32, b: u32, c: u32) -> (Option<FileMode>, Option<FileMode>, Option<FileMode>) {
        (Some(FileMode(a)), Some(FileMode(b)), Some(FileMode(c)))
    }
}
