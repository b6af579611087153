//! Bytes of a captured text, whatever wrote them.

use std::borrow::Cow;

/// The text: UTF-8 with what is none replaced, or UTF-16 as a Windows shell writes it into a file.
pub fn decode(bytes: &[u8]) -> Cow<'_, str> {
    let wide = |unit: fn([u8; 2]) -> u16, bytes: &[u8]| {
        let units: Vec<u16> = bytes.chunks_exact(2).map(|pair| unit([pair[0], pair[1]])).collect();
        Cow::Owned(String::from_utf16_lossy(&units))
    };
    match bytes {
        [0xff, 0xfe, rest @ ..] => wide(u16::from_le_bytes, rest),
        [0xfe, 0xff, rest @ ..] => wide(u16::from_be_bytes, rest),
        [0xef, 0xbb, 0xbf, rest @ ..] => String::from_utf8_lossy(rest),
        _ => String::from_utf8_lossy(bytes),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_text_is_read_in_the_encoding_its_first_bytes_name() {
        assert_eq!(decode(b"GPU 0"), "GPU 0");
        assert_eq!(decode(b"\xef\xbb\xbfGPU"), "GPU");
        assert_eq!(decode(b"\xff\xfeG\0P\0U\0"), "GPU");
        assert_eq!(decode(b"\xfe\xff\0G\0P\0U\0"), "GPU");
    }
}
