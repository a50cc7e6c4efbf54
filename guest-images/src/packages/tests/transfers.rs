//! Transfers that break, never end, or bring something else.

use std::os::unix::fs::symlink;
use std::process::Stdio;

use rustix::process::{Pid, Signal, kill_process};

use super::*;

#[test]
fn a_package_whose_hash_differs_is_refused() {
    let setup = Setup::new();
    let mut other = setup.deb.clone();
    *other.last_mut().unwrap() ^= 1;
    setup.mirror.put(DEB, Answer::File(other));
    let said = setup.install_refusal();
    assert!(said.contains("hello.deb: the SHA-256 is not that of the mirror's signed index"), "{said}");
    assert_eq!(setup.arriving(), [0; 0]);
}

#[test]
fn a_mirror_that_redirects_for_ever_is_left() {
    let setup = Setup::new();
    setup.mirror.put(DEB, Answer::Redirect("/debian/pool/moved.deb".into()));
    setup.mirror.put("pool/moved.deb", Answer::File(setup.deb.clone()));
    setup.install().unwrap();
    fs::remove_file(setup.cached()).unwrap();
    fs::remove_dir_all(setup.root()).unwrap();
    setup.mirror.put("pool/moved.deb", Answer::Redirect(format!("{}/{DEB}", setup.mirror.uri)));
    let said = setup.install_refusal();
    assert!(said.contains("hello.deb: the server has redirected more than 5 times"), "{said}");
    setup.mirror.put(DEB, Answer::Redirect("https://mirror.example/hello.deb".into()));
    let said = setup.install_refusal();
    assert!(
        said.contains("`https://mirror.example/hello.deb` is not an address that starts with http://"),
        "{said}"
    );
}

#[test]
fn no_more_is_taken_than_the_signed_index_says() {
    let setup = Setup::new();
    setup.mirror.put(DEB, Answer::Endless);
    let said = setup.install_refusal();
    assert!(said.contains(&format!("the server sends more than {} bytes", setup.deb.len())), "{said}");
    assert_eq!(setup.arriving(), [0; 0]);
    setup.mirror.put(DEB, Answer::Huge(10_000_000_000));
    let said = setup.install_refusal();
    let sizes = format!("the server sends 10000000000 bytes instead of {}", setup.deb.len());
    assert!(said.contains(&sizes), "{said}");
    for answer in [Answer::Endless, Answer::Huge(10_000_000_000)] {
        setup.mirror.put(INDEX, answer);
        let said = setup.refusal();
        assert!(said.contains("InRelease: the server sends more than 4194304 bytes"), "{said}");
    }
}

#[test]
fn a_proxys_page_in_place_of_a_package_is_refused() {
    let setup = Setup::new();
    setup.mirror.put(DEB, Answer::Page(200));
    let said = setup.install_refusal();
    assert!(said.contains("hello.deb: the server sends 26 bytes instead of "), "{said}");
    assert!(said.contains("a proxy's page") && said.contains("http_proxy and no_proxy"), "{said}");
    setup.mirror.put(DEB, Answer::Page(407));
    let said = setup.install_refusal();
    assert!(said.contains("the server answered with status 407 and a web page, as a proxy does"), "{said}");
}

#[test]
fn packages_come_through_a_proxy_except_from_hosts_that_need_none() {
    let setup = Setup::new();
    let proxy = setup.mirror.uri.replace("http://", "http://me:secret@");
    let get = |uri: &str, without: &str| {
        let client = Client::with(|name| match name {
            "http_proxy" => Some(proxy.clone()),
            "no_proxy" => Some(without.to_owned()),
            _ => None,
        });
        Downloads::new(&setup.cache, client).unwrap().text(uri)
    };
    let uri = format!("http://no-such-host.invalid/debian/{INDEX}");
    assert!(get(&uri, "").unwrap().starts_with(b"-----BEGIN PGP SIGNED MESSAGE-----"));
    assert_eq!(setup.mirror.requests(), [format!("GET {uri} HTTP/1.1")], "the proxy needs the whole address");
    let said = get(&uri, "localhost,.invalid").unwrap_err().to_string();
    assert!(said.contains("no connection to no-such-host.invalid"), "{said}");
}

#[test]
fn after_a_break_the_rest_is_fetched() {
    let setup = Setup::new();
    setup.mirror.put(DEB, Answer::BrokenOnce(setup.deb.clone(), 300_000));
    setup.install().unwrap();
    let requests = setup.mirror.requests();
    assert_eq!(requests[2..], ["", " from 300000"].map(|range| format!("GET /debian/{DEB} HTTP/1.1{range}")));
    assert_eq!(fs::read(setup.cached()).unwrap(), setup.deb);
}

#[test]
fn a_mirror_that_keeps_breaking_is_left_and_the_next_run_goes_on() {
    let setup = Setup::new();
    setup.mirror.put(DEB, Answer::Broken(setup.deb.clone(), 200_000));
    let said = setup.install_refusal();
    assert!(said.starts_with("the package hello of bookworm cannot be fetched: http://127.0.0.1:"), "{said}");
    assert!(said.contains("the connection broke") && said.contains("TALLY_GUEST"), "{said}");
    assert_eq!(setup.arriving(), [200_000]);
    setup.mirror.requests();
    setup.mirror.put(DEB, Answer::File(setup.deb.clone()));
    setup.install().unwrap();
    assert!(setup.mirror.requests().last().unwrap().ends_with(" from 200000"));
    assert_eq!(setup.arriving(), [0; 0]);
}

#[test]
fn a_server_that_sends_no_parts_is_asked_for_the_whole_again() {
    let setup = Setup::new();
    setup.mirror.put(DEB, Answer::Broken(setup.deb.clone(), 200_000));
    setup.install_refusal();
    setup.mirror.put(DEB, Answer::WholeFile(setup.deb.clone()));
    setup.install().unwrap();
    assert_eq!(fs::read(setup.cached()).unwrap(), setup.deb);
}

#[test]
fn a_part_that_is_wrong_is_fetched_again() {
    let setup = Setup::new();
    let mut other = setup.deb.clone();
    other[100_000] ^= 1;
    setup.mirror.put(DEB, Answer::Broken(other, 200_000));
    setup.install_refusal();
    setup.mirror.put(DEB, Answer::File(setup.deb.clone()));
    setup.install().unwrap();
    assert_eq!(fs::read(setup.cached()).unwrap(), setup.deb);
}

#[test]
fn a_full_disk_is_named() {
    let setup = Setup::new();
    setup.repository().update(&mut Progress::silent()).unwrap();
    let digest = setup.repository().resolve(&["hello"]).unwrap()[0].listed.hex();
    let arriving = setup.folder.path().join("downloads/arriving").join(digest);
    // Every write to this device finds no space.
    symlink("/dev/full", &arriving).unwrap();
    let said = setup.install_refusal();
    assert!(said.contains("cannot write ") && said.contains("No space left on device"), "{said}");
    setup.install().unwrap();
}

/// Downloads for [`ctrl_c_in_the_middle_leaves_nothing_half_done`], in a process of its own.
#[test]
fn child_that_downloads() {
    let (Ok(uri), Ok(cache)) = (std::env::var("TALLY_TEST_URI"), std::env::var("TALLY_TEST_CACHE")) else {
        return;
    };
    let size = std::env::var("TALLY_TEST_SIZE").unwrap().parse().unwrap();
    let listed = listed::Listed { size, sha256: [0; 32] };
    let cache = Cache::at(cache).unwrap();
    let to = cache.root().join("downloads/hello_1.0_amd64.deb");
    let _ = Downloads::new(&cache, direct()).unwrap().file(&uri, listed, &to, &mut |_| ());
}

#[test]
fn ctrl_c_in_the_middle_leaves_nothing_half_done() {
    let setup = Setup::new();
    setup.mirror.put(DEB, Answer::Stalled(setup.deb.clone(), 200_000));
    let mut child = Command::new(std::env::current_exe().unwrap());
    child.args(["--exact", "packages::tests::transfers::child_that_downloads"]);
    child.env("TALLY_TEST_URI", format!("{}/{DEB}", setup.mirror.uri));
    child.env("TALLY_TEST_CACHE", setup.folder.path()).env("TALLY_TEST_SIZE", setup.deb.len().to_string());
    let mut child = child.stdout(Stdio::null()).spawn().unwrap();
    setup.mirror.wait_for(DEB);
    while setup.folder.path().join("downloads/arriving").exists() && setup.arriving() != [200_000] {
        std::thread::yield_now();
    }
    kill_process(Pid::from_child(&child), Signal::INT).unwrap();
    assert!(!child.wait().unwrap().success());
    assert!(!setup.cached().exists());
    setup.mirror.put(DEB, Answer::File(setup.deb.clone()));
    setup.install().unwrap();
    assert_eq!(fs::read(setup.cached()).unwrap(), setup.deb);
}

#[test]
fn without_a_network_a_line_says_what_is_missing_and_how_to_do_without() {
    let mut setup = Setup::new();
    let closed = std::net::TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap();
    setup.mirror.uri = format!("http://{closed}/debian");
    let said = setup.refusal();
    assert!(said.starts_with("the package lists of bookworm cannot be fetched: "), "{said}");
    assert!(said.contains("no connection to 127.0.0.1: Connection refused"), "{said}");
    assert!(said.contains("copy the cache") && said.contains("TALLY_GUEST"), "{said}");
    setup.mirror.uri = "http://no-such-host.invalid/debian".into();
    assert!(setup.refusal().contains("no connection to no-such-host.invalid"));
}
