//! The secret of a meeting, and the proof that a side knows it. A proof is a keyed hash
//! (HMAC-SHA256) of the numbers that both sides have drawn for this connection. So it tells the
//! other side nothing about the token, and is of no use on another connection.

use crate::digest::hex;
use anyhow::{Context, Result};
use sha2::{Digest as _, Sha256};
use std::fmt;
use std::io::Read;

/// A secret of 128 bits, as 32 hexadecimal digits.
#[derive(Clone, PartialEq, Eq)]
pub struct Token(String);

/// A side of a connection. The sides' proofs differ, so that no side can return the other's proof.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Side {
    Listening,
    Connecting,
}

/// The random numbers of a connection, each drawn by one side.
#[derive(Debug, Clone, Copy)]
pub struct Nonces<'a> {
    pub connecting: &'a str,
    pub listening: &'a str,
}

const DIGITS: usize = 32;
/// SHA-256 works on blocks of this size.
const BLOCK_BYTES: usize = 64;

impl Token {
    /// Makes a random token. Fails when the system gives no random bytes.
    pub fn new() -> Result<Self> {
        random_digits().map(Self)
    }

    /// Parses a token that a person enters. The error names the allowed form.
    pub fn parse(text: &str) -> Result<Self, String> {
        let text = text.trim();
        if is_digits(text) {
            Ok(Self(text.to_owned()))
        } else {
            Err("a token has 32 hexadecimal digits".to_owned())
        }
    }

    pub fn text(&self) -> &str {
        &self.0
    }

    /// Returns the proof of `side`. It covers `message`, which the side sends with the proof.
    pub fn prove(&self, side: Side, nonces: Nonces<'_>, message: &str) -> String {
        let Nonces {
            connecting,
            listening,
        } = nonces;
        let text = format!("nccl-spark\n{side:?}\n{connecting}\n{listening}\n{message}");
        hex(&hmac(self.0.as_bytes(), text.as_bytes()))
    }

    /// True if `proof` is the proof of `side`. The time of the comparison does not depend on where
    /// the proofs differ.
    pub fn is_proved(&self, side: Side, nonces: Nonces<'_>, message: &str, proof: &str) -> bool {
        let own = self.prove(side, nonces, message);
        let difference = own
            .bytes()
            .zip(proof.bytes())
            .fold(0, |sum, (one, other)| sum | (one ^ other));
        own.len() == proof.len() && difference == 0
    }
}

impl fmt::Debug for Token {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Token(..)")
    }
}

/// Draws a random number. Fails when the system gives no random bytes.
pub fn nonce() -> Result<String> {
    random_digits()
}

/// True if `text` has the form of a [`nonce`].
pub fn is_nonce(text: &str) -> bool {
    is_digits(text)
}

fn is_digits(text: &str) -> bool {
    text.len() == DIGITS && text.bytes().all(|byte| byte.is_ascii_hexdigit())
}

fn random_digits() -> Result<String> {
    let mut bytes = [0; DIGITS / 2];
    let random =
        std::fs::File::open("/dev/urandom").and_then(|mut file| file.read_exact(&mut bytes));
    random.context("read /dev/urandom for a token")?;
    Ok(hex(&bytes))
}

/// HMAC-SHA256 (RFC 2104). `key` has at most [`BLOCK_BYTES`] bytes.
fn hmac(key: &[u8], text: &[u8]) -> [u8; 32] {
    let padded = |pad: u8| {
        let mut block = [pad; BLOCK_BYTES];
        block
            .iter_mut()
            .zip(key)
            .for_each(|(byte, key)| *byte ^= key);
        block
    };
    let inner = Sha256::new()
        .chain_update(padded(0x36))
        .chain_update(text)
        .finalize();
    Sha256::new()
        .chain_update(padded(0x5c))
        .chain_update(inner)
        .finalize()
        .into()
}

#[cfg(test)]
mod tests {
    use super::*;

    const NONCES: Nonces<'static> = Nonces {
        connecting: "1",
        listening: "2",
    };

    /// RFC 4231, test case 2.
    #[test]
    fn the_keyed_hash_is_that_of_the_standard() {
        let hash = hex(&hmac(b"Jefe", b"what do ya want for nothing?"));
        assert_eq!(
            hash,
            "5bdcc146bf60754e6a042426089575c75a003f089d2739839dec58b964ec3843"
        );
    }

    #[test]
    fn a_proof_is_valid_for_its_token_side_numbers_and_message_alone() {
        let token = Token::new().unwrap();
        let other = Token::new().unwrap();
        let proof = token.prove(Side::Listening, NONCES, "m");
        assert!(token.is_proved(Side::Listening, NONCES, "m", &proof));
        assert!(!other.is_proved(Side::Listening, NONCES, "m", &proof));
        assert!(!token.is_proved(Side::Connecting, NONCES, "m", &proof));
        assert!(!token.is_proved(Side::Listening, NONCES, "n", &proof));
        for nonces in [
            Nonces {
                connecting: "3",
                ..NONCES
            },
            Nonces {
                listening: "3",
                ..NONCES
            },
        ] {
            assert!(!token.is_proved(Side::Listening, nonces, "m", &proof));
        }
        assert!(!token.is_proved(Side::Listening, NONCES, "m", &proof[1..]));
        assert!(!token.is_proved(Side::Listening, NONCES, "m", ""));
    }

    #[test]
    fn a_token_has_one_form() {
        let token = Token::new().unwrap();
        assert_eq!(
            Token::parse(&format!(" {}\n", token.text())),
            Ok(token.clone())
        );
        assert!(Token::parse("secret").is_err() && Token::parse(&"g".repeat(32)).is_err());
        assert_eq!(format!("{token:?}"), "Token(..)");
        assert!(
            is_nonce(&nonce().unwrap()) && !is_nonce("") && nonce().unwrap() != nonce().unwrap()
        );
    }
}
