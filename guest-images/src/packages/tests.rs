//! What users see of mirrors, good and bad ones.

mod anywhere;
mod indexes;
mod mirror;
mod transfers;

use super::*;
use crate::cache::folder_of_ours;
use crate::release::{Arch, Suite};
use crate::sources::{Archive, Expiry};
use archive_keys::Keys;
use mirror::{Answer, Mirror, TestKey};
use tempfile::TempDir;

const RELEASE: Release = Release { suite: Suite::Bookworm, arch: Arch::X86_64 };
const INDEX: &str = "dists/bookworm/InRelease";
const DEB: &str = "pool/hello.deb";

/// Returns a client that uses no proxy, whatever this machine's variables say.
fn direct() -> Client {
    Client::with(|_| None)
}

/// A mirror with the package `hello`, and a cache.
struct Setup {
    folder: TempDir,
    cache: Cache,
    mirror: Mirror,
    key: TestKey,
    deb: Vec<u8>,
}

impl Setup {
    fn new() -> Self {
        let folder = folder_of_ours();
        let cache = Cache::at(folder.path()).unwrap();
        let (mirror, key) = (Mirror::start(), TestKey::new());
        // Some blocks long, and not the same everywhere.
        let content = (0..100_000).map(|line| line.to_string()).collect::<Vec<_>>().join("\n");
        let deb = deb::tests::package(&[("./usr/share/hello", content.as_bytes())], &[]);
        mirror.publish("bookworm", &key, &[("hello", &deb)], "");
        Self { folder, cache, mirror, key, deb }
    }

    /// Publishes the package again, with more fields in the index.
    fn publish(&self, fields: &str) {
        self.mirror.publish("bookworm", &self.key, &[("hello", &self.deb)], fields);
    }

    fn repository(&self) -> Repository {
        self.repository_with(None, &self.key)
    }

    fn repository_with(&self, security: Option<&Mirror>, key: &TestKey) -> Repository {
        self.repository_of(security, key, Expiry::Refused)
    }

    fn repository_of(&self, security: Option<&Mirror>, key: &TestKey, expiry: Expiry) -> Repository {
        let archive = |mirror: &Mirror| Archive { uri: mirror.uri.clone(), signed_by: None, expiry };
        let keys = Keys::of(key.certificate.clone());
        let lists = Lists::new(&self.cache, RELEASE, archive(&self.mirror), security.map(archive), keys);
        Repository::new(&self.cache, lists.unwrap(), direct(), None).unwrap()
    }

    /// Fetches the lists. Returns the line that a user sees if that fails.
    fn refusal(&self) -> String {
        self.repository().update(&mut Progress::silent()).unwrap_err().to_string()
    }

    /// Fetches and unpacks the package.
    fn install(&self) -> Result<()> {
        let (repository, progress) = (self.repository(), &mut Progress::silent());
        repository.update(progress)?;
        repository.unpack(&repository.resolve(&["hello"])?, &self.root(), progress)
    }

    /// Returns the line that a user sees if the package cannot be had. Nothing half-done is left.
    fn install_refusal(&self) -> String {
        let said = self.install().unwrap_err().to_string();
        assert!(!self.root().exists() && !self.cached().exists(), "{said}");
        assert!(!said.contains('\n'), "{said}");
        said
    }

    fn root(&self) -> PathBuf {
        self.folder.path().join("root")
    }

    fn cached(&self) -> PathBuf {
        self.folder.path().join("downloads/hello_1.0_amd64.deb")
    }

    /// Returns the sizes of the files that are arriving.
    fn arriving(&self) -> Vec<u64> {
        let folder = fs::read_dir(self.folder.path().join("downloads/arriving")).unwrap();
        folder.map(|entry| entry.unwrap().metadata().unwrap().len()).collect()
    }
}
