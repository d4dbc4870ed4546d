//! The exact bytes of every token, in one contiguous buffer.
//!
//! Vocabularies spell tokens in two ways. *Byte-level* vocabularies (GPT-2 and its successors) write each byte as one
//! printable character: `Ġ` is the space. *`SentencePiece`* vocabularies write a space as `▁`, and a byte that is not a
//! character as `<0x0A>`. Both spellings are decoded once, when the vocabulary is loaded, so that streaming only copies
//! slices.

/// Spelling of the ordinary tokens of a vocabulary.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum TokenEncoding {
    /// One character per byte.
    ByteLevel,
    /// Text with `▁` for the space and `<0x0A>` for bytes.
    SentencePiece,
}

/// Bytes of all tokens, by id.
#[derive(Clone, Debug, Default)]
pub(super) struct TokenBytes {
    bytes: Vec<u8>,
    ends: Vec<usize>,
}

impl TokenBytes {
    /// Returns the number of ids.
    pub(super) fn len(&self) -> usize {
        self.ends.len()
    }

    /// Returns the bytes of a token; empty for an unknown id.
    pub(super) fn get(&self, id: u32) -> &[u8] {
        let id = id as usize;
        let Some(&end) = self.ends.get(id) else { return &[] };
        let start = if id == 0 { 0 } else { self.ends[id - 1] };
        &self.bytes[start..end]
    }

    /// Appends a token without bytes (an unused id, padding of the vocabulary).
    pub(super) fn push_nothing(&mut self) {
        self.ends.push(self.bytes.len());
    }

    /// Appends a token whose spelling is its text.
    pub(super) fn push_literal(&mut self, text: &str) {
        self.bytes.extend_from_slice(text.as_bytes());
        self.ends.push(self.bytes.len());
    }

    /// Appends an ordinary token.
    pub(super) fn push_spelled(&mut self, token: &str, spelling: TokenEncoding) {
        match spelling {
            TokenEncoding::ByteLevel => self.push_byte_level(token),
            TokenEncoding::SentencePiece => self.push_sentence_piece(token),
        }
    }

    fn push_byte_level(&mut self, token: &str) {
        let start = self.bytes.len();
        for character in token.chars() {
            if let Some(byte) = byte_of_char(character) {
                self.bytes.push(byte);
            } else {
                // The character is not in the byte-level alphabet: this is an added token, whose spelling is its text.
                self.bytes.truncate(start);
                self.bytes.extend_from_slice(token.as_bytes());
                break;
            }
        }
        self.ends.push(self.bytes.len());
    }

    fn push_sentence_piece(&mut self, token: &str) {
        if let Some(byte) = byte_token(token) {
            self.bytes.push(byte);
        } else {
            let mut parts = token.split('▁');
            self.bytes.extend_from_slice(parts.next().unwrap_or_default().as_bytes());
            for part in parts {
                self.bytes.push(b' ');
                self.bytes.extend_from_slice(part.as_bytes());
            }
        }
        self.ends.push(self.bytes.len());
    }
}

/// Returns the byte of a token of the form `<0x0A>`.
pub(super) fn byte_token(token: &str) -> Option<u8> {
    let digits = token.strip_prefix("<0x")?.strip_suffix('>')?;
    // `from_str_radix` would also accept a sign.
    (digits.len() == 2 && digits.bytes().all(|digit| digit.is_ascii_hexdigit()))
        .then(|| u8::from_str_radix(digits, 16).ok())
        .flatten()
}

/// Returns whether the character of a byte in the byte-level alphabet has the byte as its code.
const fn is_printed_as_itself(byte: u8) -> bool {
    matches!(byte, b'!'..=b'~' | 0xA1..=0xAC | 0xAE..=0xFF)
}

/// Bytes whose character has another code, in the order of their characters U+0100, U+0101, …
const SHIFTED: [u8; 68] = {
    let mut shifted = [0; 68];
    let (mut byte, mut count) = (0_u8, 0);
    loop {
        if !is_printed_as_itself(byte) {
            shifted[count] = byte;
            count += 1;
        }
        if byte == u8::MAX {
            break;
        }
        byte += 1;
    }
    shifted
};

/// Returns the byte of a character of the byte-level alphabet.
fn byte_of_char(character: char) -> Option<u8> {
    let code = u32::from(character);
    match u8::try_from(code) {
        Ok(byte) => is_printed_as_itself(byte).then_some(byte),
        Err(_) => SHIFTED.get((code - 0x100) as usize).copied(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn bytes_of(token: &str, spelling: TokenEncoding) -> Vec<u8> {
        let mut pieces = TokenBytes::default();
        pieces.push_spelled(token, spelling);
        pieces.get(0).to_vec()
    }

    #[test]
    fn the_byte_alphabet_is_a_bijection_of_all_bytes() {
        let alphabet = tokenizers::pre_tokenizers::byte_level::ByteLevel::alphabet();
        let mut bytes: Vec<u8> = alphabet.iter().map(|&character| byte_of_char(character).unwrap()).collect();
        bytes.sort_unstable();
        assert_eq!(bytes, (0..=255).collect::<Vec<u8>>());
        assert_eq!(byte_of_char('Ġ'), Some(b' '));
        assert_eq!(byte_of_char(' '), None);
        assert_eq!(byte_of_char('▁'), None);
    }

    #[test]
    fn tokens_are_spelled_out_exactly() {
        assert_eq!(bytes_of("Ġtea", TokenEncoding::ByteLevel), b" tea");
        assert_eq!(bytes_of("ðŁ", TokenEncoding::ByteLevel), [0xF0, 0x9F]);
        assert_eq!(bytes_of("<｜end｜>", TokenEncoding::ByteLevel), "<｜end｜>".as_bytes());
        assert_eq!(bytes_of("▁▁tea▁", TokenEncoding::SentencePiece), b"  tea ");
        assert_eq!(bytes_of("<0x0A>", TokenEncoding::SentencePiece), b"\n");
        assert_eq!(bytes_of("<0xfF>", TokenEncoding::SentencePiece), [0xFF]);
        assert_eq!(bytes_of("<0x+A>", TokenEncoding::SentencePiece), b"<0x+A>");
        assert_eq!(bytes_of("<0x0A>", TokenEncoding::ByteLevel), b"<0x0A>");
    }

    #[test]
    fn ids_out_of_range_and_holes_have_no_bytes() {
        let mut pieces = TokenBytes::default();
        pieces.push_literal("a");
        pieces.push_nothing();
        pieces.push_literal("b");
        assert_eq!(
            (pieces.get(0), pieces.get(1), pieces.get(2), pieces.get(3)),
            (&b"a"[..], &[][..], &b"b"[..], &[][..])
        );
        assert_eq!(pieces.get(u32::MAX), b"");
    }
}
