//! Streaming detokenizer: converts the bytes of tokens to complete characters.
//!
//! Its only state is the bytes of an incomplete character. A character is part of the delta in which its last byte
//! arrives. A U+FFFD that the model itself generated is emitted at once. Emitted text is never changed, cleaned up or
//! retracted. Bytes that cannot become a character are replaced by U+FFFD exactly as in [`String::from_utf8_lossy`]. So
//! the joined deltas (with the final flush) equal the lossy decoding of all bytes, however the bytes were split into
//! tokens.

use super::Vocabulary;

/// Initial capacity of the buffer; a longer token (a run of spaces or dashes) makes the buffer grow once.
const TOKEN_CAPACITY_BYTES: usize = 256;

/// Converts a stream of token ids to a stream of text.
#[derive(Clone, Debug)]
pub struct Detokenizer {
    /// Bytes of an incomplete character; at most three between calls.
    carry: Vec<u8>,
    skip_special: bool,
    /// Whether the next token is the first of the text.
    first: bool,
}

impl Detokenizer {
    /// Creates a detokenizer for the start of a text.
    ///
    /// A vocabulary that adds a space before the first word strips it from the first token. With `skip_special`,
    /// control tokens are left out of the text.
    pub fn new(skip_special: bool) -> Self {
        Self { carry: Vec::with_capacity(TOKEN_CAPACITY_BYTES), skip_special, first: true }
    }

    /// Creates a detokenizer for tokens that continue a text (a prompt): no leading space is stripped.
    pub fn continuing(skip_special: bool) -> Self {
        Self { first: false, ..Self::new(skip_special) }
    }

    /// Appends to `out` the characters that the token completes.
    pub fn push(&mut self, vocab: &dyn Vocabulary, id: u32, out: &mut String) {
        if self.skip_special && vocab.is_special(id) {
            return;
        }
        vocab.token_bytes(id, self.first, &mut self.carry);
        self.first = false;
        self.drain(out);
    }

    /// Appends to `out` the characters that the bytes complete.
    pub fn push_bytes(&mut self, bytes: &[u8], out: &mut String) {
        self.first = false;
        self.carry.extend_from_slice(bytes);
        self.drain(out);
    }

    /// Ends the text: an incomplete character becomes one U+FFFD.
    pub fn flush(&mut self, out: &mut String) {
        if !self.carry.is_empty() {
            self.carry.clear();
            out.push(char::REPLACEMENT_CHARACTER);
        }
    }

    /// Returns the number of bytes of the incomplete character (0 to 3).
    pub fn held_bytes(&self) -> usize {
        self.carry.len()
    }

    /// Moves every complete character from `carry` to `out`.
    fn drain(&mut self, out: &mut String) {
        let mut done = 0;
        for chunk in self.carry.utf8_chunks() {
            out.push_str(chunk.valid());
            done += chunk.valid().len();
            let broken = chunk.invalid();
            // Invalid bytes at the very end may be the start of a character; elsewhere they are invalid.
            let at_end = done + broken.len() == self.carry.len();
            if broken.is_empty() || (at_end && is_prefix_of_char(broken)) {
                continue;
            }
            out.push(char::REPLACEMENT_CHARACTER);
            done += broken.len();
        }
        self.carry.drain(..done);
    }
}

/// Returns whether more bytes can complete these bytes, which are not a character, to a character.
fn is_prefix_of_char(bytes: &[u8]) -> bool {
    std::str::from_utf8(bytes).is_err_and(|error| error.error_len().is_none())
}
