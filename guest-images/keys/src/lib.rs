//! The keys of archives, and signatures of their indexes (`OpenPGP`, RFC 9580).
//!
//! Debian's keys are in the program, so that a machine needs none. A signature by one key is enough; that key and the
//! subkey that has signed must neither have expired nor be revoked.

pub mod date;

use std::fs::File;
use std::path::Path;
use std::sync::LazyLock;
use std::time::{Duration, SystemTime};

use pgp::composed::{CleartextSignedMessage, Deserializable, SignedPublicKey, SignedPublicSubKey};
use pgp::packet::{Signature, SignatureType};
use pgp::types::{KeyDetails, KeyId, Timestamp, VerifyingKey};

/// The keys of Debian 12 and 13, and of their security updates, from the package debian-archive-keyring, which says
/// where they are published. These are their fingerprints:
///
/// ```text
/// B8B8 0B5B 623E AB6A D877  5C45 B7C5 D7D6 3509 47F8  archive, Debian 12
/// 05AB 9034 0C0C 5E79 7F44  A8C8 254C F3B5 AEC0 A8F0  security updates, Debian 12
/// 4D64 FEC1 19C2 0290 67D6  E791 F8D2 585B 8783 D481  stable release, Debian 12
/// 04B5 4C3C DCA7 9751 B16B  C6B5 2256 29DF 75B1 88BD  archive, Debian 13
/// 5E04 A1E3 223A 19A2 0706  E20F 9904 613D 4CCE 68C6  security updates, Debian 13
/// 4158 7F7D B8C7 74BC CF13  1416 762F 67A0 B2C3 9DE4  stable release, Debian 13
/// ```
const DEBIAN: &str = include_str!("../debian.asc");

static EMBEDDED: LazyLock<Vec<SignedPublicKey>> = LazyLock::new(|| read(DEBIAN.as_bytes()));

/// Keys by which an index may be signed.
#[derive(Clone)]
pub struct Keys {
    certificates: Vec<SignedPublicKey>,
}

/// The reason why a signed text is not accepted.
#[derive(Debug, PartialEq, Eq)]
pub enum Refusal {
    /// The text is not one with a signature.
    NotSigned,
    /// What is wrong with its signatures.
    Signature(String),
}

impl Keys {
    pub fn of_debian() -> Self {
        Self { certificates: EMBEDDED.clone() }
    }

    /// Adds the keys in a file of this machine, if it can be read.
    #[must_use]
    pub fn with_file(mut self, path: &Path) -> Self {
        if let Ok(file) = File::open(path) {
            self.certificates.extend(read(file));
        }
        self
    }

    /// Returns the keys of an archive that signs with this one alone.
    pub fn of(certificate: SignedPublicKey) -> Self {
        Self { certificates: vec![certificate] }
    }

    /// Returns a text that is signed by one of the keys, without its signatures.
    pub fn verify(&self, signed: &str, now: SystemTime) -> Result<String, Refusal> {
        let (message, _) = CleartextSignedMessage::from_string(signed).map_err(|_| Refusal::NotSigned)?;
        let text = message.signed_text();
        let mut reason = None;
        for signature in message.signatures() {
            for certificate in &self.certificates {
                match verify_by(certificate, signature, &text, now) {
                    Some(Ok(())) => return Ok(text.replace("\r\n", "\n")),
                    Some(Err(why)) => reason = Some(why),
                    None => {}
                }
            }
        }
        let of_others = || {
            let ids = message.signatures().iter().flat_map(Signature::issuer_key_id);
            let ids: Vec<String> = ids.copied().map(name_of).collect();
            format!("it is signed by keys that this program does not have ({})", ids.join(", "))
        };
        Err(Refusal::Signature(reason.unwrap_or_else(of_others)))
    }
}

/// Returns the times at which the first and the last of Debian's keys in this program expire.
pub fn expiry() -> (SystemTime, SystemTime) {
    let times = || EMBEDDED.iter().filter_map(expiry_of);
    let first = times().min().unwrap_or(SystemTime::UNIX_EPOCH);
    (first, times().max().unwrap_or(first))
}

fn read(keys: impl std::io::Read + Send) -> Vec<SignedPublicKey> {
    let Ok((keys, _)) = SignedPublicKey::from_reader_many(keys) else { return Vec::new() };
    keys.filter_map(Result::ok).filter(|key| key.verify_bindings().is_ok()).collect()
}

/// Verifies a signature if it is by a key of this certificate.
fn verify_by(
    certificate: &SignedPublicKey,
    signature: &Signature,
    text: &str,
    now: SystemTime,
) -> Option<Result<(), String>> {
    let primary = &certificate.primary_key;
    if is_issuer(primary, signature) {
        return Some(check_primary(certificate, now).and_then(|()| check(primary, signature, text, now)));
    }
    let subkey = certificate.public_subkeys.iter().find(|subkey| is_issuer(&subkey.key, signature))?;
    let outcome = check_primary(certificate, now)
        .and_then(|()| check_subkey(subkey, now))
        .and_then(|()| check(&subkey.key, signature, text, now));
    Some(outcome)
}

/// Returns a key's number as `gpg` writes it.
fn name_of(id: KeyId) -> String {
    id.to_string().to_uppercase()
}

fn is_issuer(key: &impl VerifyingKey, signature: &Signature) -> bool {
    signature.issuer_fingerprint().contains(&&key.fingerprint())
        || signature.issuer_key_id().contains(&&key.legacy_key_id())
}

fn check(key: &impl VerifyingKey, signature: &Signature, text: &str, now: SystemTime) -> Result<(), String> {
    let id = name_of(key.legacy_key_id());
    if !matches!(signature.typ(), Some(SignatureType::Text | SignatureType::Binary)) {
        return Err(format!("the signature by key {id} is not one of a text"));
    }
    signature.verify(key, text.as_bytes()).map_err(|_| format!("the signature by key {id} is wrong"))?;
    let expiry = signature.created().and_then(|at| end(at, signature.signature_expiration_time()));
    not_expired("the signature by key", &id, expiry, now)
}

fn check_primary(certificate: &SignedPublicKey, now: SystemTime) -> Result<(), String> {
    let id = name_of(certificate.primary_key.legacy_key_id());
    if !certificate.details.revocation_signatures.is_empty() {
        return Err(format!("the key {id} is revoked"));
    }
    not_expired("the key", &id, expiry_of(certificate), now)
}

fn check_subkey(subkey: &SignedPublicSubKey, now: SystemTime) -> Result<(), String> {
    let id = name_of(subkey.key.legacy_key_id());
    if subkey.signatures.iter().any(|signature| signature.typ() == Some(SignatureType::SubkeyRevocation)) {
        return Err(format!("the key {id} is revoked"));
    }
    let Some(binding) = subkey.signatures.iter().max_by_key(|signature| signature.created()) else {
        return Err(format!("the key {id} is not bound"));
    };
    if !binding.key_flags().sign() {
        return Err(format!("the key {id} is not for signatures"));
    }
    not_expired("the key", &id, end(subkey.key.created_at(), binding.key_expiration_time()), now)
}

fn not_expired(what: &str, id: &str, expiry: Option<SystemTime>, now: SystemTime) -> Result<(), String> {
    match expiry.filter(|at| *at <= now) {
        Some(at) => Err(format!("{what} {id} has expired on {}", date::day(at))),
        None => Ok(()),
    }
}

/// Returns the time at which a certificate's primary key expires, by the newest signature of each of its users.
fn expiry_of(certificate: &SignedPublicKey) -> Option<SystemTime> {
    let details = &certificate.details;
    let of_users = details.users.iter().map(|user| &user.signatures);
    let groups = of_users.chain([&details.direct_signatures]);
    let newest =
        groups.filter_map(|signatures| signatures.iter().max_by_key(|signature| signature.created()));
    let created = certificate.primary_key.created_at();
    newest.filter_map(|signature| end(created, signature.key_expiration_time())).min()
}

/// Returns the end of a time that begins at `from`, or `None` if it has no end.
fn end(from: Timestamp, lasts: Option<pgp::types::Duration>) -> Option<SystemTime> {
    let lasts = lasts.map(Duration::from).filter(|lasts| !lasts.is_zero())?;
    Some(SystemTime::from(from) + lasts)
}
