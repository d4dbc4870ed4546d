//! Streaming detokenizer: bytes of tokens in, whole characters out.
//!
//! The detokenizer keeps only the bytes of an incomplete character. A character is sent in the delta in which its last
//! byte arrives, a U+FFFD that the model wrote is sent at once, and sent text never changes. Bytes that cannot become a
//! character turn into U+FFFD exactly as with [`String::from_utf8_lossy`], so the joined deltas (with the final flush)
//! equal the lossy decoding of all bytes, however they were split.

use super::Vocabulary;

/// Initial capacity for the bytes of one token; longer tokens (runs of spaces or dashes) grow the buffer once.
const TOKEN_ROOM_BYTES: usize = 256;

/// Converts a stream of token ids to a stream of text.
#[derive(Clone, Debug)]
pub struct Detokenizer {
    /// Between calls: an incomplete character, at most three bytes.
    carry: Vec<u8>,
    skip_special: bool,
    /// The next token is the first of the text.
    first: bool,
}

impl Detokenizer {
    /// A detokenizer for the beginning of a text: a vocabulary that adds a space before the first word omits it here.
    /// `skip_special` omits control tokens.
    pub fn new(skip_special: bool) -> Self {
        Self { carry: Vec::with_capacity(TOKEN_ROOM_BYTES), skip_special, first: true }
    }

    /// A detokenizer for tokens that continue a text (a prompt): a leading space is kept.
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

    /// Bytes of an incomplete character (0 to 3).
    pub fn held_bytes(&self) -> usize {
        self.carry.len()
    }

    /// Moves every complete character out of the carry.
    fn drain(&mut self, out: &mut String) {
        let mut done = 0;
        for chunk in self.carry.utf8_chunks() {
            out.push_str(chunk.valid());
            done += chunk.valid().len();
            let broken = chunk.invalid();
            // Broken bytes at the very end may be the beginning of a character; elsewhere they are just broken.
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

/// Whether the bytes, known not to be a character, can be completed to one.
fn is_prefix_of_char(bytes: &[u8]) -> bool {
    std::str::from_utf8(bytes).is_err_and(|error| error.error_len().is_none())
}
