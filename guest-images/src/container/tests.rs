use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::io::Write;
use std::os::unix::fs::MetadataExt;

use flate2::Compression;
use flate2::write::GzEncoder;
use tar::{Builder, EntryType, Header};
use tempfile::TempDir;

use super::*;

fn hex(bytes: &[u8]) -> String {
    let mut text = String::new();
    for byte in Sha256::digest(bytes) {
        write!(text, "{byte:02x}").unwrap();
    }
    text
}

fn gzip(bytes: &[u8]) -> Vec<u8> {
    let mut encoder = GzEncoder::new(Vec::new(), Compression::fast());
    encoder.write_all(bytes).unwrap();
    encoder.finish().unwrap()
}

/// Makes a tar archive. Names are written as they are, whatever they are.
#[derive(Default)]
struct Tar(Vec<u8>);

impl Tar {
    fn member(
        mut self,
        name: &str,
        kind: EntryType,
        link: &str,
        content: &[u8],
        (mode, user): (u32, u64),
    ) -> Self {
        let mut header = Header::new_ustar();
        header.as_mut_bytes()[..name.len()].copy_from_slice(name.as_bytes());
        header.as_mut_bytes()[157..157 + link.len()].copy_from_slice(link.as_bytes());
        header.set_entry_type(kind);
        header.set_size(content.len() as u64);
        header.set_mode(mode);
        header.set_uid(user);
        header.set_gid(user + 1);
        header.set_mtime(1_000_000_000);
        header.set_cksum();
        self.0.extend(header.as_bytes());
        self.0.extend(content);
        self.0.resize(self.0.len().next_multiple_of(512), 0);
        self
    }

    fn file(self, name: &str, content: &str) -> Self {
        self.member(name, EntryType::Regular, "", content.as_bytes(), (0o644, 0))
    }

    fn folder(self, name: &str) -> Self {
        self.member(name, EntryType::Directory, "", b"", (0o755, 0))
    }

    fn link(self, name: &str, target: &str) -> Self {
        self.member(name, EntryType::Symlink, target, b"", (0o777, 0))
    }

    fn hard_link(self, name: &str, target: &str) -> Self {
        self.member(name, EntryType::Link, target, b"", (0o644, 0))
    }

    fn end(mut self) -> Vec<u8> {
        self.0.extend([0; 1024]);
        self.0
    }
}

fn configuration(layers: &[Vec<u8>]) -> Vec<u8> {
    let digests: Vec<_> = layers.iter().map(|layer| format!("sha256:{}", hex(layer))).collect();
    serde_json::to_vec(&serde_json::json!({
        "architecture": manifest::architecture(Arch::default()),
        "os": "linux",
        "config": {
            "Entrypoint": ["/bin/start"], "Cmd": ["serve"], "Env": ["PATH=/bin", "A=b=c"],
            "WorkingDir": "/srv/work", "User": "web:www", "Labels": null,
        },
        "rootfs": { "type": "layers", "diff_ids": digests },
    }))
    .unwrap()
}

/// Returns the files of an archive as docker saves it.
fn docker(layers: &[Vec<u8>]) -> Vec<(String, Vec<u8>)> {
    let configuration = configuration(layers);
    let config = format!("{}.json", hex(&configuration));
    let names: Vec<_> = (0..layers.len()).map(|number| format!("{number}/layer.tar")).collect();
    let manifest = serde_json::json!([{ "Config": config, "RepoTags": ["a:latest"], "Layers": names }]);
    let mut files: Vec<_> = names.into_iter().zip(layers.iter().cloned()).collect();
    files.push((config, configuration));
    files.push((manifest_name(), serde_json::to_vec(&manifest).unwrap()));
    files
}

fn manifest_name() -> String {
    "manifest.json".to_owned()
}

/// Returns the files of an OCI layout with compressed layers, below an index of two platforms.
fn oci(layers: &[Vec<u8>]) -> Vec<(String, Vec<u8>)> {
    let mut files = vec![(manifest::OCI_LAYOUT.to_owned(), b"{\"imageLayoutVersion\":\"1.0.0\"}".to_vec())];
    let mut blob = |bytes: Vec<u8>| {
        let digest = hex(&bytes);
        let descriptor = serde_json::json!({ "digest": format!("sha256:{digest}"), "size": bytes.len() });
        files.push((format!("blobs/sha256/{digest}"), bytes));
        descriptor
    };
    let config = blob(configuration(layers));
    let layers: Vec<_> = layers.iter().map(|layer| blob(gzip(layer))).collect();
    let manifest =
        blob(serde_json::to_vec(&serde_json::json!({ "config": config, "layers": layers })).unwrap());
    let mut here = manifest.clone();
    here["platform"] =
        serde_json::json!({ "architecture": manifest::architecture(Arch::default()), "os": "linux" });
    let mut other = manifest;
    other["platform"] = serde_json::json!({ "architecture": "s390x", "os": "linux" });
    let list = blob(serde_json::to_vec(&serde_json::json!({ "manifests": [other, here] })).unwrap());
    files.push((
        manifest::OCI_INDEX.to_owned(),
        serde_json::to_vec(&serde_json::json!({ "manifests": [list] })).unwrap(),
    ));
    files
}

fn archive(files: &[(String, Vec<u8>)]) -> Vec<u8> {
    let mut archive = Builder::new(Vec::new());
    for (name, content) in files {
        let mut header = Header::new_gnu();
        header.set_size(content.len() as u64);
        header.set_mode(0o644);
        archive.append_data(&mut header, name, &content[..]).unwrap();
    }
    archive.into_inner().unwrap()
}

struct Place(TempDir);

impl Place {
    fn new() -> Self {
        Self(tempfile::tempdir().unwrap())
    }

    fn cache(&self) -> Cache {
        Cache::at(self.0.path().join("cache")).unwrap()
    }

    fn open(&self, content: &[u8]) -> Result<Image> {
        let file = self.0.path().join("image");
        fs::write(&file, content).unwrap();
        open(&self.cache(), &file, Arch::default(), &mut Progress::silent())
    }

    /// Opens an image that is refused. Returns why.
    fn refused(&self, content: &[u8]) -> String {
        let reason = self.open(content).unwrap_err().to_string();
        assert!(!reason.contains('\n'), "{reason}");
        let left: Vec<_> =
            fs::read_dir(self.cache().root()).unwrap().map(|entry| entry.unwrap().file_name()).collect();
        assert!(!left.iter().any(|name| name.to_string_lossy().starts_with("image-")), "{left:?}");
        reason
    }
}

/// Returns the files of an image: paths with their content, their links' targets, or `/`.
fn tree(root: &Path) -> BTreeMap<String, String> {
    let mut tree = BTreeMap::new();
    let mut folders = vec![root.to_owned()];
    while let Some(folder) = folders.pop() {
        for entry in fs::read_dir(folder).unwrap().map(|entry| entry.unwrap()) {
            let path = entry.path();
            let kind = entry.file_type().unwrap();
            let what = if kind.is_dir() {
                folders.push(path.clone());
                "/".to_owned()
            } else if kind.is_symlink() {
                format!("-> {}", fs::read_link(&path).unwrap().display())
            } else {
                fs::read_to_string(&path).unwrap()
            };
            tree.insert(path.strip_prefix(root).unwrap().display().to_string(), what);
        }
    }
    tree
}

fn layers() -> Vec<Vec<u8>> {
    let lower = Tar::default()
        .folder("./")
        .folder("usr/lib")
        .link("lib", "/usr/lib")
        .file("usr/lib/old", "old")
        .file("etc/gone", "gone")
        .file("etc/kept", "kept")
        .file("opaque/below", "below")
        .file("opaque/kept/below", "below")
        .file("opaque/made/below", "below")
        .file("was-file", "file")
        .file("was-folder/inner", "inner")
        .hard_link("etc/also-kept", "etc/kept")
        .end();
    let upper = Tar::default()
        // Debian's images have /lib as a link, and layers that say "lib/...".
        .file("lib/new", "new")
        .file("etc/.wh.gone", "")
        // Before what removes what is below them, and with names of their own in it.
        .file("opaque/above", "above")
        .folder("opaque/kept")
        .file("opaque/kept/above", "above")
        .file("opaque/made/above", "above")
        .member("x", EntryType::XHeader, "", b"29 SCHILY.xattr.user.a=b\nc=\xff\n", (0, 0))
        .file("opaque/.wh..wh..opq", "")
        .folder("was-file")
        .file("was-file/now", "folder")
        .file("was-folder", "file")
        .member("bin/start", EntryType::Regular, "", b"start", (0o4511, 1000))
        .member("dev/null", EntryType::Char, "", b"", (0o666, 0))
        .end();
    vec![lower, upper]
}

fn expected() -> BTreeMap<String, String> {
    [
        ("usr", "/"),
        ("usr/lib", "/"),
        ("usr/lib/old", "old"),
        ("usr/lib/new", "new"),
        ("lib", "-> /usr/lib"),
        ("etc", "/"),
        ("etc/kept", "kept"),
        ("etc/also-kept", "kept"),
        ("opaque", "/"),
        ("opaque/above", "above"),
        ("opaque/kept", "/"),
        ("opaque/kept/above", "above"),
        ("opaque/made", "/"),
        ("opaque/made/above", "above"),
        ("was-file", "/"),
        ("was-file/now", "folder"),
        ("was-folder", "file"),
        ("bin", "/"),
        ("bin/start", "start"),
        ("dev", "/"),
        ("srv", "/"),
        ("srv/work", "/"),
    ]
    .map(|(path, what)| (path.to_owned(), what.to_owned()))
    .into()
}

#[test]
fn all_formats_have_the_same_files_and_are_unpacked_once() {
    let place = Place::new();
    let images = [archive(&docker(&layers())), archive(&oci(&layers())), gzip(&archive(&oci(&layers())))];
    let mut roots = Vec::new();
    for image in images {
        let image = place.open(&image).unwrap();
        assert_eq!(tree(&image.root), expected());
        let words = |words: &[&str]| Some(words.iter().map(|word| (*word).to_owned()).collect::<Vec<_>>());
        assert_eq!(
            image.config,
            Config {
                entrypoint: words(&["/bin/start"]),
                cmd: words(&["serve"]),
                env: words(&["PATH=/bin", "A=b=c"]),
                working_dir: Some("/srv/work".into()),
                user: Some("web:www".into()),
            }
        );
        roots.push(image.root);
    }
    assert!(roots.windows(2).all(|pair| pair[0] == pair[1]), "{roots:?}");
    let folder = place.0.path().join("layout");
    for (name, content) in oci(&layers()) {
        let path = folder.join(name);
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        fs::write(path, content).unwrap();
    }
    assert!(is_image(&folder) && !is_image(place.0.path()));
    let opened = open(&place.cache(), &folder, Arch::default(), &mut Progress::silent()).unwrap();
    assert_eq!(opened.root, roots[0]);
}

#[test]
fn owners_and_modes_are_those_of_the_image_wherever_the_cache_is() {
    let place = Place::new();
    let image = place.open(&archive(&docker(&layers()))).unwrap();
    let owned = |image: &Image, name: &str| {
        let inode = fs::metadata(image.root.join(name)).unwrap().ino();
        image.owners.clone().into_inner().into_iter().find(|(known, _)| *known == inode).unwrap().1
    };
    let start = Owned { user: 1000, group: 1001, mode: 0o4511 };
    assert_eq!(owned(&image, "bin/start"), start);
    assert_eq!(owned(&image, "srv"), Owned { user: 0, group: 0, mode: 0o755 });
    assert_eq!(fs::metadata(&image.root).unwrap().mode() & 0o777, 0o700, "others cannot enter");
    let metadata = fs::metadata(image.root.join("bin/start")).unwrap();
    assert_eq!(
        (metadata.mode() & 0o7777, metadata.mtime()),
        (0o711, 1_000_000_000),
        "nothing of it is set-user-ID here"
    );
    // As a copy of the cache has other inodes.
    let copied = place.0.path().join("copied");
    fs::create_dir(&copied).unwrap();
    fs::rename(&image.root, copied.join("root")).unwrap();
    fs::create_dir(&image.root).unwrap();
    let again = place.open(&archive(&docker(&layers()))).unwrap();
    assert_eq!((tree(&again.root), owned(&again, "bin/start")), (expected(), start));
}

/// Waits three seconds, after which the archive cannot have changed unseen.
#[test]
fn a_compressed_archive_is_decompressed_once_as_long_as_it_does_not_change() {
    let place = Place::new();
    let file = place.0.path().join("image");
    fs::write(&file, gzip(&archive(&docker(&layers())))).unwrap();
    let open = || open(&place.cache(), &file, Arch::default(), &mut Progress::silent());
    std::thread::sleep(std::time::Duration::from_millis(3100));
    let first = open().unwrap();
    // Nothing can be decompressed any more.
    let unfinished = place.cache().root().join("unfinished");
    fs::remove_dir_all(&unfinished).unwrap();
    fs::write(&unfinished, "").unwrap();
    let again = open().unwrap();
    assert_eq!((again.root, again.owners, again.config), (first.root, first.owners, first.config));
    fs::write(&file, gzip(&archive(&docker(&layers())))).unwrap();
    open().unwrap_err();
}

#[test]
fn a_folder_that_is_named_like_an_images_is_an_ordinary_one() {
    let place = Place::new();
    let image = place.open(&archive(&docker(&layers()))).unwrap();
    assert_eq!(hold(&image.root).unwrap().unwrap().owners, image.owners);
    let other = place.0.path().join("image-of-mine/root");
    assert!(hold(&other).unwrap().unwrap_err().contains("not in the cache any more"));
    fs::create_dir_all(&other).unwrap();
    assert!(hold(&other).is_none());
}

/// Nothing of an image is ever outside of its folder.
#[test]
fn links_lead_nowhere_but_into_the_image() {
    let outside = tempfile::tempdir().unwrap();
    let secret = outside.path().join("secret");
    fs::write(&secret, "secret").unwrap();
    let out = outside.path().display().to_string();
    let layer = Tar::default()
        .link("absolute", &out)
        .file("absolute/written", "inside")
        .link("above", "../../../../..")
        .file("above/top", "inside")
        .link("secret", &secret.display().to_string())
        .file("secret", "inside")
        .link("folder", &out)
        .file("folder/.wh.secret", "")
        .file("folder/.wh..wh..opq", "")
        .link("lib", "usr/lib")
        .file("lib/x", "inside")
        .end();
    let place = Place::new();
    let image = place.open(&archive(&docker(&[layer]))).unwrap();
    let names: Vec<_> =
        fs::read_dir(outside.path()).unwrap().map(|entry| entry.unwrap().file_name()).collect();
    assert_eq!((names, fs::read_to_string(&secret).unwrap()), (vec!["secret".into()], "secret".to_owned()));
    let tree = tree(&image.root);
    assert_eq!((&*tree["secret"], &*tree["top"], &*tree["usr/lib/x"]), ("inside", "inside", "inside"));
}

#[test]
fn what_cannot_be_an_image_is_refused_in_one_line() {
    let place = Place::new();
    let one = |layer: Tar| archive(&docker(&[layer.end()]));
    let refused = |content: &[u8], reason: &str| {
        let said = place.refused(content);
        assert!(said.contains(reason), "{said}");
    };
    refused(b"no archive", "no archive of an image");
    let mut broken = Tar::default().file("name\n\u{1b}[2J", "").end();
    broken[148..156].copy_from_slice(b"checksum");
    refused(&broken, "name??[2J");
    refused(&archive(&[("a".into(), b"b".to_vec())]), "neither manifest.json nor index.json");
    refused(
        &one(Tar::default().file("a/../../b", "")),
        "layer 1: a/../../b: this path leads out of the image",
    );
    refused(
        &one(Tar::default().hard_link("a", "etc/passwd")),
        "a link to etc/passwd, which the image does not have",
    );
    refused(&one(Tar::default().hard_link("a", "../etc/passwd")), "leads out of the image");
    refused(&one(Tar::default().folder("a").hard_link("b", "a")), "a link to a folder");
    // By way of links, deeper than any path says.
    let down = ["d"; 40].join("/");
    let deep = (0..8).fold(Tar::default(), |layer, step| {
        let (from, to) = if step == 0 {
            (String::new(), down.clone())
        } else {
            (format!("l{step}/"), format!("l{step}/{down}"))
        };
        layer.folder(&format!("{from}{down}")).link(&format!("l{}", step + 1), &to)
    });
    refused(&one(deep), "folders more than 256 deep");
    refused(&one(Tar::default().member("a", EntryType::XHeader, "", b"999999 path=", (0, 0))), "layer 1: ");
    let long = vec![b'x'; 2 << 20];
    refused(
        &one(Tar::default().member("a", EntryType::GNULongName, "", &long, (0, 0))),
        "more than 1048576 bytes",
    );
    let name = "x".repeat(99);
    refused(
        &one(Tar::default()
            .file(&vec!["y"; 50].join("/"), "")
            .file(&format!("{name}\u{7}"), "")
            .hard_link("\u{7}", "no")),
        "?: it is a link",
    );
    // Digests, and what is only said.
    let changed = |files: &[(String, Vec<u8>)], which: &dyn Fn(&str) -> bool, with: &[u8]| {
        let change = |(name, content): &(String, Vec<u8>)| {
            (name.clone(), if which(name) { with.to_vec() } else { content.clone() })
        };
        archive(&files.iter().map(change).collect::<Vec<_>>())
    };
    let docker_files = docker(&layers());
    refused(
        &changed(&docker_files, &|name| name == "1/layer.tar", &Tar::default().end()),
        "layer 2: its digest is not sha256:",
    );
    refused(&changed(&docker_files, &|name| name.len() > 64, b"{}"), "its digest is not");
    refused(&changed(&docker_files, &|name| name == "manifest.json", b"[]"), "it has 0 images");
    let two =
        br#"[{"Config":"a","RepoTags":["x:1"],"Layers":[]},{"Config":"b","RepoTags":["y:2"],"Layers":[]}]"#;
    refused(
        &changed(&docker_files, &|name| name == "manifest.json", two),
        "it has 2 images (x:1, y:2): save one",
    );
    let out = br#"[{"Config":"../../etc/passwd","Layers":[]}]"#;
    refused(&changed(&docker_files, &|name| name == "manifest.json", out), "leads out of it");
    let oci_files = oci(&layers());
    refused(
        &changed(&oci_files, &|name| name == "index.json", br#"{"manifests":[]}"#),
        "no image for linux/",
    );
    let wrong = br#"{"manifests":[{"digest":"sha256:../../../etc/passwd"}]}"#;
    refused(&changed(&oci_files, &|name| name == "index.json", wrong), "is no SHA-256 digest");
    refused(&changed(&oci_files, &|name| name.starts_with("blobs"), b"{}"), "its digest is not sha256:");
}

/// An index that is its own manifest would be read for ever.
#[test]
fn indexes_in_indexes_have_an_end() {
    let mut files = vec![];
    let mut inner = b"{\"manifests\":[]}".to_vec();
    for _ in 0..10 {
        let digest = hex(&inner);
        files.push((format!("blobs/sha256/{digest}"), inner));
        inner = format!("{{\"manifests\":[{{\"digest\":\"sha256:{digest}\"}}]}}").into_bytes();
    }
    files.push((manifest::OCI_INDEX.to_owned(), inner));
    assert!(Place::new().refused(&archive(&files)).contains("too many indexes"));
}

#[test]
fn a_bomb_ends_where_there_is_no_more_room() {
    let place = Place::new();
    let mut unpacking = Unpacking::into(place.0.path()).unwrap();
    unpacking.room.bytes = 2 * 4096 + 1000;
    let layer = Tar::default().file("a", &"x".repeat(600)).file("b", &"x".repeat(600)).end();
    let reason = unpacking.apply(&mut &layer[..]).unwrap_err();
    assert!(reason.starts_with("b: unpacked, it would fill the file system"), "{reason}");
    assert_eq!(fs::metadata(place.0.path().join("b")).unwrap().len(), 400);
}
