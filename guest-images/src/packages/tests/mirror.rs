//! A mirror on this machine, with a throwaway key.

use std::collections::HashMap;
use std::io::{BufRead, BufReader, Write};
use std::net::{TcpListener, TcpStream};
use std::sync::{Arc, Mutex};
use std::thread;
use std::time::{Duration, SystemTime};

use lzma_rust2::{XzOptions, XzWriter};
use pgp::composed::{
    ArmorOptions, CleartextSignedMessage, KeyType, SecretKeyParamsBuilder, SignedPublicKey, SignedSecretKey,
};
use pgp::packet::{KeyFlags, SignatureConfig, SignatureType, Subpacket, SubpacketData};
use pgp::types::{KeyDetails, Password, Tag, Timestamp};
use rand::thread_rng;

use super::super::listed::{hash, to_hex};

/// What the mirror answers to a request for a path.
#[derive(Clone)]
pub enum Answer {
    /// A file, or the part that is asked for.
    File(Vec<u8>),
    /// A file, always from its beginning.
    WholeFile(Vec<u8>),
    /// The first bytes of a file, with the size of the whole. Then the connection ends.
    Broken(Vec<u8>, usize),
    /// The same once, and then the file.
    BrokenOnce(Vec<u8>, usize),
    /// The first bytes of a file, with the size of the whole. Then nothing more comes.
    Stalled(Vec<u8>, usize),
    /// A status with a page.
    Page(u16),
    Redirect(String),
    /// Bytes without an end, and without a size.
    Endless,
    /// Bytes of this size.
    Huge(u64),
}

/// Answers and the requests that came, each with its first line and its range.
#[derive(Default)]
struct Shared {
    answers: HashMap<String, Answer>,
    requests: Vec<String>,
}

/// A server that runs until the tests end.
#[derive(Clone)]
pub struct Mirror {
    pub uri: String,
    shared: Arc<Mutex<Shared>>,
}

impl Mirror {
    pub fn start() -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let uri = format!("http://{}/debian", listener.local_addr().unwrap());
        let mirror = Self { uri, shared: Arc::default() };
        let server = mirror.clone();
        thread::spawn(move || {
            for stream in listener.incoming() {
                let server = server.clone();
                thread::spawn(move || {
                    // Whoever asks may leave before the end.
                    let _ = server.serve(stream.unwrap());
                });
            }
        });
        mirror
    }

    /// Sets the answer for a path below the mirror's address.
    pub fn put(&self, path: &str, answer: Answer) {
        self.shared.lock().unwrap().answers.insert(format!("/debian/{path}"), answer);
    }

    /// Returns the requests since the last call.
    pub fn requests(&self) -> Vec<String> {
        std::mem::take(&mut self.shared.lock().unwrap().requests)
    }

    /// Waits for a request for a path that ends like this.
    pub fn wait_for(&self, end: &str) {
        while !self.shared.lock().unwrap().requests.iter().any(|request| request.contains(end)) {
            thread::sleep(Duration::from_millis(1));
        }
    }

    /// Publishes a suite with these packages, each a name and a `.deb` file.
    pub fn publish(&self, suite: &str, key: &TestKey, packages: &[(&str, &[u8])], fields: &str) {
        let stanzas = packages.iter().map(|(name, deb)| {
            let path = format!("pool/{name}.deb");
            self.put(&path, Answer::File(deb.to_vec()));
            let (size, hash) = (deb.len(), hex(deb));
            format!(
                "Package: {name}\nVersion: 1.0\nArchitecture: amd64\nFilename: {path}\nSize: {size}\nSHA256: {hash}\n"
            )
        });
        let list = stanzas.collect::<Vec<_>>().join("\n");
        let mut packer = XzWriter::new(Vec::new(), XzOptions::default()).unwrap();
        packer.write_all(list.as_bytes()).unwrap();
        let compressed = packer.finish().unwrap();
        let line = |content: &[u8], name: &str| format!(" {} {} {name}\n", hex(content), content.len());
        let path = "main/binary-amd64/Packages";
        let date = if fields.contains("Date:") { "" } else { "Date: Sat, 11 Jul 2026 10:16:37 UTC\n" };
        let index = format!(
            "Codename: {suite}\n{date}{fields}SHA256:\n{}{}",
            line(list.as_bytes(), path),
            line(&compressed, &format!("{path}.xz"))
        );
        self.put(&format!("dists/{suite}/{path}.xz"), Answer::File(compressed));
        self.put(&format!("dists/{suite}/InRelease"), Answer::File(key.sign(&index).into_bytes()));
    }

    fn serve(&self, mut stream: TcpStream) -> std::io::Result<()> {
        let mut reader = BufReader::new(stream.try_clone()?);
        let (mut line, mut from) = (String::new(), 0);
        reader.read_line(&mut line)?;
        let request = line.trim_end().to_owned();
        while line != "\r\n" && !line.is_empty() {
            line.clear();
            reader.read_line(&mut line)?;
            if let Some(range) = line.strip_prefix("Range: bytes=") {
                from = range.trim_end().trim_end_matches('-').parse().unwrap();
            }
        }
        let target = request.split(' ').nth(1).unwrap_or_default();
        // A request to a proxy has the whole address.
        let path = target.strip_prefix("http://").map_or(target, |rest| &rest[rest.find('/').unwrap()..]);
        let answer = {
            let mut shared = self.shared.lock().unwrap();
            shared.requests.push(if from > 0 { format!("{request} from {from}") } else { request.clone() });
            let answer = shared.answers.get(path).cloned();
            if let Some(Answer::BrokenOnce(content, _)) = &answer {
                let whole = Answer::File(content.clone());
                shared.answers.insert(path.to_owned(), whole);
            }
            answer
        };
        let head = |status: &str, fields: &str| format!("HTTP/1.1 {status}\r\n{fields}\r\n");
        let size = |size: usize| format!("Content-Length: {size}\r\n");
        match answer {
            None => write!(stream, "{}", head("404 Not Found", &size(0))),
            Some(Answer::File(content)) if from > 0 && from < content.len() => {
                let range =
                    format!("Content-Range: bytes {from}-{}/{}\r\n", content.len() - 1, content.len());
                let fields = size(content.len() - from) + &range;
                write!(stream, "{}", head("206 Partial Content", &fields))?;
                stream.write_all(&content[from..])
            }
            Some(Answer::File(content) | Answer::WholeFile(content)) => {
                write!(stream, "{}", head("200 OK", &size(content.len())))?;
                stream.write_all(&content)
            }
            Some(Answer::Broken(content, end) | Answer::BrokenOnce(content, end)) => {
                write!(stream, "{}", head("200 OK", &size(content.len())))?;
                stream.write_all(&content[..end])
            }
            Some(Answer::Stalled(content, end)) => {
                write!(stream, "{}", head("200 OK", &size(content.len())))?;
                stream.write_all(&content[..end])?;
                reader.read_line(&mut line).map(drop)
            }
            Some(Answer::Page(status)) => {
                let page = "<html>Please log in</html>";
                let fields = size(page.len()) + "Content-Type: text/html\r\n";
                write!(stream, "{}{page}", head(&format!("{status} Page"), &fields))
            }
            Some(Answer::Redirect(to)) => {
                write!(stream, "{}", head("302 Found", &format!("Location: {to}\r\n")))
            }
            Some(Answer::Endless) => {
                write!(stream, "{}", head("200 OK", "Transfer-Encoding: chunked\r\n"))?;
                loop {
                    write!(stream, "10000\r\n")?;
                    stream.write_all(&vec![b'x'; 0x10000])?;
                    write!(stream, "\r\n")?;
                }
            }
            Some(Answer::Huge(size)) => {
                write!(stream, "{}", head("200 OK", &format!("Content-Length: {size}\r\n")))?;
                loop {
                    stream.write_all(&vec![b'x'; 0x10000])?;
                }
            }
        }
    }
}

fn hex(content: &[u8]) -> String {
    to_hex(&hash(content).unwrap())
}

/// A key that signs indexes.
pub struct TestKey {
    key: SignedSecretKey,
    pub certificate: SignedPublicKey,
}

impl TestKey {
    /// Makes a key that never expires.
    pub fn new() -> Self {
        Self::lasting(Duration::ZERO, None)
    }

    /// Makes a key of this age, which lasts for some time from then on.
    pub fn lasting(age: Duration, lasts: Option<Duration>) -> Self {
        let created = Timestamp::try_from(SystemTime::now() - age).unwrap();
        let mut builder = SecretKeyParamsBuilder::default();
        builder.key_type(KeyType::Ed25519Legacy).can_sign(true).can_certify(true);
        builder.created_at(created).primary_user_id("Test <test@mirror.example>".to_owned());
        let key = builder.build().unwrap().generate(thread_rng()).unwrap();
        let mut certificate = key.to_public_key();
        if let Some(lasts) = lasts {
            let mut flags = KeyFlags::default();
            flags.set_sign(true);
            let lasts = u32::try_from(lasts.as_secs()).unwrap();
            let fields = [
                SubpacketData::SignatureCreationTime(created),
                SubpacketData::IssuerFingerprint(key.fingerprint()),
                SubpacketData::KeyFlags(flags),
                SubpacketData::KeyExpirationTime(pgp::types::Duration::from_secs(lasts)),
            ];
            let secret = &key.primary_key;
            let mut config =
                SignatureConfig::from_key(thread_rng(), secret, SignatureType::CertPositive).unwrap();
            config.hashed_subpackets =
                fields.map(|field| Subpacket::regular(field).unwrap()).into_iter().collect();
            let user = &mut certificate.details.users[0];
            let (public, password) = (&certificate.primary_key, Password::empty());
            let signed = config.sign_certification(secret, public, &password, Tag::UserId, &user.id);
            user.signatures = vec![signed.unwrap()];
        }
        certificate.verify_bindings().unwrap();
        Self { key, certificate }
    }

    /// Signs an index.
    pub fn sign(&self, text: &str) -> String {
        let message =
            CleartextSignedMessage::sign(thread_rng(), text, &self.key.primary_key, &Password::empty())
                .unwrap();
        message.to_armored_string(ArmorOptions::default()).unwrap()
    }
}
