//! Tests of guests whose root is a folder of the host: this machine's, and one with a dynamically linked program. One
//! host for all of them, some 30 guests and 6 boots: two minutes of a core.

use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::LazyLock;

use guest_tests::lab::{Results, StepOutput, Steps};
use guest_tests::suite::{Test, second_tier};
use guest_tests::tests;
use guest_tests::{program, stdout};

/// The tests of this module.
pub fn tests() -> Vec<Test> {
    let first = tests![
        a_command_finds_the_hosts_files_and_its_changes_are_gone,
        it_starts_from_a_template_within_eight_hundredths_of_a_second,
        a_program_finds_its_libraries_in_another_root,
        a_command_has_the_callers_folder_environment_and_status,
        without_a_command_there_is_a_shell,
        a_hostile_guest_does_not_see_what_is_hidden,
        a_user_reads_what_he_may_read_and_nothing_else,
        shares_pass_through_below_the_root,
        mounts_are_seen_only_if_that_is_wanted,
        the_guest_sees_what_changes_on_the_host,
        a_guest_with_a_root_is_saved_and_restored,
        an_image_of_a_container_runs_as_it_says,
        a_command_runs_as_another_user,
        wrong_input_is_one_line_and_makes_nothing,
    ];
    let second = second_tier(tests![
        a_kernel_without_the_file_systems_is_told_by_its_options,
        every_thread_makes_only_its_calls,
    ]);
    [first, second].concat()
}

/// A watcher in the guest: it looks at files before and after the host has changed them.
const WATCH: &str = "cd /scenario/changing; cat replaced removed written folder/file; ls appeared 2>&1; echo ready; read go; sleep 1.3; \
    for file in replaced removed written folder/file late; do echo $file: $(cat $file 2>&1); done";

/// What the guest with the name `web` does: it can be saved when it has said `ready`.
const SAVED: &str = "echo in-memory >/etc/written; i=0; while [ $i -lt 20 ]; do i=$((i+1)); sleep 0.1; [ $i != 3 ] || echo ready; done; \
    cat /etc/written kept/file";

/// Virtual time, in hundredths of a second.
const SOON: u64 = 8;

fn tally(options: &str, command: &str) -> String {
    format!("$HERE/tally run {options} -- {command}")
}

/// Makes `image.tar` of two layers, as `docker save` does. Its program prints what it is given.
const IMAGE: &str = "\
mkdir -p image/one/bin image/one/etc image/one/srv/work image/two/etc; cd image
cp $(readlink -f /bin/sh) one/bin/busybox; for name in sh cat id ls env stat; do ln -s busybox one/bin/$name; done
printf 'root:x:0:0:root:/root:/bin/sh\\nweb:x:33:34:Web:/srv:/bin/sh\\n' >one/etc/passwd
printf 'www:x:34:\\nlogs:x:40:web\\n' >one/etc/group
echo gone >one/etc/gone; echo below >one/etc/name; echo above >two/etc/name; : >two/etc/.wh.gone
printf '#!/bin/sh\\necho \"$@\"; id; echo $GREETING $HOME $PATH $PWD; ls /etc; cat /etc/name; echo x >/etc/name || echo denied; echo said >/dev/stderr\\n' >two/start
chmod 755 two/start; chown 33:34 one/srv/work; chmod 750 one/srv/work
for layer in one two; do tar cf $layer.tar -C $layer .; done
sum() { sha256sum $1 | cut -d' ' -f1; }
printf '{\"architecture\":\"amd64\",\"os\":\"linux\",\"config\":{\"Entrypoint\":[\"/start\"],\"Cmd\":[\"a\",\"b c\"],\"Env\":[\"PATH=/bin\",\"GREETING=a=b\"],\"WorkingDir\":\"/srv/work\",\"User\":\"web\"},\"rootfs\":{\"type\":\"layers\",\"diff_ids\":[\"sha256:%s\",\"sha256:%s\"]}}' $(sum one.tar) $(sum two.tar) >config
mv config $(sum config).json
printf '[{\"Config\":\"%s\",\"Layers\":[\"one.tar\",\"two.tar\"]}]' *.json >manifest.json
tar cf ../image.tar manifest.json *.json one.tar two.tar; cd ..
";
/// What its program prints.
const SAID: &str = "a b c\nuid=33(web) gid=34(www) groups=40(logs)\na=b /srv /bin /srv/work\ngroup\nname\npasswd\nabove\ndenied\n";

/// Mounts a file system that does not answer, like NFS without its server.
const SILENT: &str =
    "exec 8<>/dev/fuse; mount -t fuse -o fd=8,rootmode=40000,user_id=0,group_id=0 silent silent";

static RESULTS: LazyLock<Results> = LazyLock::new(|| {
    let steps = LIBRARIES.iter().fold(Steps::new("roots"), |steps, file| {
        let name: &'static str = format!("system{}", file.display()).leak();
        steps.file(file, name)
    });
    let steps = steps
        .file(dynamic(), "system/bin/dynamic")
        .file(program("restricted"), "restricted")
        .step("begin", "mkdir -p system/etc system/home changing/folder kept work; echo of-the-system >system/etc/name; echo kept >kept/file");
    let here = "export HERE=$PWD TALLY_CACHE=$PWD/cache TALLY_BOOT= HOME=/root LANG=C.UTF-8 TERM=dumb; ";
    let step = |steps: Steps, name: &str, commands: &str| steps.step(name, &format!("{here}{commands}"));
    let timed = format!(
        "read begun rest </proc/uptime; {}; read ended rest </proc/uptime; echo $begun $ended",
        tally("-v --root /", "echo hello")
    );
    let steps = step(
        steps,
        "files",
        &format!(
            "{}; [ -e /etc/made ] || echo not-here",
            tally(
                "--root /",
                "sh -c 'cmp tally /scenario/tally && echo same; echo made >/etc/made; cat /etc/made; rm tally; [ -e tally ] || echo removed; \
            for folder in /proc/self /sys/kernel /dev/null /dev/pts /run /tmp; do [ -e $folder ] || echo no $folder; done; grep -c \" / overlay \" /proc/mounts'"
            )
        ),
    );
    let steps = step(steps, "timed", &timed);
    let steps = step(
        steps,
        "dynamic",
        &format!(
            "{}; cd system/home; {}",
            tally("--root system", "/bin/dynamic --version"),
            tally("--root ..", "/bin/dynamic --help"),
        ),
    );
    let steps = step(
        steps,
        "caller",
        &format!(
            "export LC_TIME=fr SECRET=x GIVEN=here LANG=de; mkdir -p work/bin; printf '#!/bin/sh\\necho found; exit 5' >work/bin/only-here; chmod +x work/bin/only-here; \
         cd work; PATH=$PWD/bin:$PATH {}; echo $?; {}; unset NOT_SET; {}",
            tally("--root /", "only-here"),
            tally(
                "--root / --env GIVEN --env OTHER=a=b",
                "sh -c 'pwd; echo $HOME $LANG $LC_TIME $TERM [$SECRET] $GIVEN $OTHER'"
            ),
            tally("--root / --env NOT_SET", "true"),
        ),
    );
    let steps = step(steps, "shell", "echo 'echo in $PWD; exit 3' | SHELL= $HERE/tally run --root /");
    let steps = step(
        steps,
        "hidden",
        &format!(
            "mkdir -p /tmp/here /run/tally; echo secret >/tmp/here/secret; {}",
            tally(
                "--root /",
                "sh -c 'mkdir /m; mount -t virtiofs tally0 /m; for place in dev proc run sys tmp tmp/here/secret scenario/cache; do [ -e /m/$place ] && echo $place; done; \
            ls -a /m /m/scenario | grep -x -e dev -e proc -e run -e sys -e tmp -e cache; touch /m/made 2>&1; ls /m/scenario/kept'"
            )
        ),
    );
    let steps = step(
        steps,
        "user",
        &format!(
            "chmod 666 /dev/kvm; echo -1 >/proc/sys/kernel/perf_event_paranoid; echo secret >kept/closed; chmod 600 kept/closed; mkdir -p kept/folder; chmod 700 kept/folder; \
         mkdir -p /tmp/home; chmod 777 /tmp/home; export HOME=/tmp/home TALLY_CACHE=/tmp/home/cache; ./restricted unprivileged {}",
            tally("--root /", "sh -c 'id -u; cat kept/file; cat kept/closed; ls kept/folder; echo $?'")
        ),
    );
    let steps = step(
        steps,
        "shares",
        &format!(
            "cd work; mkdir -p /tmp/outside; {}; cat made /tmp/outside/made; [ -e ../kept/made ] || echo not-there",
            tally(
                "--root / --share .:rw --share /tmp/outside:rw",
                "sh -c 'pwd; echo made >made; echo outside >/tmp/outside/made; echo x >../kept/made; ls /tmp'"
            )
        ),
    );
    let steps = step(
        steps,
        "mounts",
        &format!(
            "mkdir -p mounted silent; mount -t tmpfs tmpfs mounted; echo inside >mounted/file; {SILENT}; timeout 60 {0}; umount -l silent; exec 8>&-; \
             {1}; cd mounted; {2}; {3}; cd /tmp/here; {2}",
            tally("--root /", "sh -c 'ls -l >/dev/null; ls silent; ls mounted'"),
            tally("--root / --root-mounts", "cat mounted/file"),
            tally("--root /", "pwd"),
            tally("--root / --root-mounts", "pwd"),
        ),
    );
    let steps = step(
        steps,
        "changing",
        &format!(
            "cd changing; for file in replaced removed written folder/file; do echo old >$file; done; mkfifo go; {} <go >said 2>&1 & exec 9>$HERE/changing/go; \
         until grep -qs ready $HERE/changing/said; do sleep 0.1; done; cd $HERE/changing; echo new >next; mv next replaced; rm removed; echo newer >written; \
         rm -r folder; mkdir folder; echo anew >folder/file; echo late >late; echo >&9; exec 9>&-; wait; cat said",
            tally("--root /", &format!("sh -c '{WATCH}'"))
        ),
    );
    let steps = step(
        steps,
        "saved",
        &format!(
            "{} >said 2>&1 & until grep -qs ready said; do sleep 0.1; done; ./tally snapshot web web.saved --stop; wait; cd /; $HERE/tally run --restore $HERE/web.saved",
            tally("--name web --root /", &format!("sh -c '{SAVED}'"))
        ),
    );
    let image = [
        "$HERE/tally run --root image.tar 2>said; status=$?; grep -c ^said said",
        &tally(
            "--root image.tar --user root",
            "sh -c 'id; stat -c \"%a %u %g\" /srv/work /start; echo $HOME'",
        ),
        "chmod 666 /dev/kvm; echo -1 >/proc/sys/kernel/perf_event_paranoid; mkdir -p /tmp/another",
        "chown $(./restricted unprivileged sh -c 'id -u') /tmp/another; export HOME=/tmp/another TALLY_CACHE=/tmp/another/cache",
        "./restricted unprivileged $HERE/tally run --root image.tar 2>/dev/null",
    ];
    let steps = step(steps, "image", &format!("{IMAGE}{}", image.join("\n")));
    let others = [
        tally("--root / --user 1000:1001", "sh -c 'id; echo $HOME; touch kept/made'"),
        tally("--user 12", "id -u"),
        tally("--root image.tar --user nobody", "id"),
    ];
    let steps = step(steps, "another", &others.join("; "));
    let wrong = [
        "--root none",
        "--root tally",
        "--root /proc",
        "--root / --initrd none",
        "--root / --append root=/dev/vda",
        "--root / --kernel payload",
        "--root-mounts",
        "--root / --share /tmp",
        "--env =x",
    ];
    let steps = wrong.iter().fold(steps, |steps, options| {
        step(
            steps,
            &wrong_step(options),
            &format!("ls >before; {}; status=$?; ls | cmp - before; exit $status", tally(options, "true")),
        )
    });
    steps
        .second_tier(|steps| {
            let steps =
                step(steps, "no-overlay", &tally("--root / --append module_blacklist=overlay", "true"));
            let steps =
                step(steps, "no-virtiofs", &tally("--root / --append module_blacklist=virtiofs", "true"));
            step(
                steps,
                "confined",
                &format!(
                    "dmesg -C; {}; dmesg | grep -c type=1326",
                    tally(
                        "--sandbox log --root /",
                        "sh -c 'find /scenario | wc -l >/dev/null; cat tally >/dev/null'"
                    )
                ),
            )
        })
        .run()
});

/// A dynamically linked program of this machine, and what the loader wants for it.
fn dynamic() -> PathBuf {
    // Of the GNU coreutils, which are dynamically linked in all distributions.
    Path::new("/bin/cat").canonicalize().expect("every machine has it")
}

static LIBRARIES: LazyLock<Vec<PathBuf>> = LazyLock::new(|| {
    let listed = Command::new("ldd").arg(dynamic()).output().expect("the C library has it");
    let words = stdout(&listed);
    let libraries: Vec<PathBuf> =
        words.split_whitespace().filter(|word| word.starts_with('/')).map(PathBuf::from).collect();
    assert!(libraries.len() > 1, "a loader and a library: {words}");
    libraries
});

fn wrong_step(options: &str) -> String {
    options.replace(|c: char| !c.is_ascii_alphanumeric(), "-")
}

fn of(step: &str) -> &'static StepOutput {
    RESULTS.of(step)
}

fn assert_text(step: &str, text: &str) {
    let done = of(step);
    assert_eq!(done.text(), text, "{step}: {}", done.err);
}

fn a_command_finds_the_hosts_files_and_its_changes_are_gone() {
    assert_text("files", "same\nmade\nremoved\n1\nnot-here\n");
}

fn it_starts_from_a_template_within_eight_hundredths_of_a_second() {
    let done = of("timed");
    let text = done.text();
    let ["hello", times] = text.lines().collect::<Vec<_>>()[..] else { panic!("{text}{}", done.err) };
    let times: Vec<u64> =
        times.replace('.', "").split(' ').map(|time| time.parse().expect("a time")).collect();
    assert!(done.err.contains("the guest starts from the template"), "{}", done.err);
    // The clock has whole hundredths, and the run itself ends after the output.
    assert!(times[1] - times[0] <= SOON, "{text}");
}

fn a_program_finds_its_libraries_in_another_root() {
    let done = of("dynamic");
    assert_eq!(done.status, 0, "{}", done.err);
    assert!(done.text().contains("cat (") && done.text().contains("Usage: "), "{}", done.text());
}

fn a_command_has_the_callers_folder_environment_and_status() {
    let done = of("caller");
    let text = "found\n5\n/scenario/work\n/root de fr dumb [] here a=b\n";
    assert_eq!((done.text().as_str(), done.status), (text, 125), "{}", done.err);
    assert!(done.err.contains("--env NOT_SET: it is not set here"), "{}", done.err);
}

fn without_a_command_there_is_a_shell() {
    assert_text("shell", "in /scenario\n");
    assert_eq!(of("shell").status, 3);
}

fn a_hostile_guest_does_not_see_what_is_hidden() {
    assert_text("hidden", "touch: /m/made: Read-only file system\nfile\n");
}

fn a_user_reads_what_he_may_read_and_nothing_else() {
    let done = of("user");
    assert_eq!(done.text(), "0\nkept\n1\n", "{}", done.err);
    assert_eq!(done.err.matches("Permission denied").count(), 2, "{}", done.err);
}

fn shares_pass_through_below_the_root() {
    assert_text("shares", "/scenario/work\noutside\nmade\noutside\nnot-there\n");
}

fn mounts_are_seen_only_if_that_is_wanted() {
    let done = of("mounts");
    assert_eq!(done.text(), "inside\n/scenario/mounted\n", "{}", done.err);
    for said in [
        "ls: silent: No such file",
        "ls: mounted: No such file",
        "does not see /scenario/mounted: `--share .` brings it, or `--root-mounts`",
        "the guest has a /tmp of its own, without the current folder: `--share .` brings it",
    ] {
        assert!(done.err.contains(said), "{said}: {}", done.err);
    }
}

fn the_guest_sees_what_changes_on_the_host() {
    let text = of("changing").text();
    let (_, seen) = text.split_once("ready\n").unwrap_or_else(|| panic!("{text}"));
    let removed = "removed: cat: can't open 'removed': No such file or directory";
    assert_eq!(seen, format!("replaced: new\n{removed}\nwritten: newer\nfolder/file: anew\nlate: late\n"));
}

fn a_guest_with_a_root_is_saved_and_restored() {
    assert_text("saved", "in-memory\nkept\n");
}

/// As root, and as a user to whom nothing of it belongs on the host.
fn an_image_of_a_container_runs_as_it_says() {
    let root = "uid=0(root) gid=0\n750 33 34\n755 0 0\n/root\n";
    assert_text("image", &format!("{SAID}1\n{root}{SAID}"));
}

fn a_command_runs_as_another_user() {
    let done = of("another");
    assert_eq!((done.status, &*done.text()), (125, "uid=1000 gid=1001\n/\n12\n"), "{}", done.err);
    for said in ["kept/made: Permission denied", "tally: the guest has no user nobody"] {
        assert!(done.err.contains(said), "{said}: {}", done.err);
    }
}

fn wrong_input_is_one_line_and_makes_nothing() {
    for (options, said) in [
        ("--root none", "--root none: no such directory"),
        ("--root tally", "--root tally: it is no archive of an image: "),
        ("--root /proc", "--root /proc: the kernel's process table cannot be shared"),
        ("--root / --initrd none", "'--root <DIR|IMAGE>' cannot be used with '--initrd <PATH>'"),
        ("--root / --append root=/dev/vda", "--root, and root= in --append: a guest has one root"),
        ("--root / --kernel payload", "--root needs the default guest, and payload is no Linux kernel"),
        ("--root-mounts", "--root <DIR|IMAGE>"),
        ("--root / --share /tmp", "--share /tmp: the guest has a /tmp of its own; share a folder in it"),
        ("--env =x", "a variable needs a name"),
    ] {
        let done = of(&wrong_step(options));
        assert_eq!(
            (done.status, done.text().as_str(), done.err.lines().count()),
            (125, "", 1),
            "{options}: {}",
            done.err
        );
        assert!(done.err.contains(said), "{options}: {}", done.err);
    }
}

fn a_kernel_without_the_file_systems_is_told_by_its_options() {
    for (step, option) in [("no-overlay", "CONFIG_OVERLAY_FS"), ("no-virtiofs", "CONFIG_VIRTIO_FS")] {
        let done = of(step);
        assert_eq!((done.status, done.err.lines().count()), (125, 1), "{}", done.err);
        assert!(done.err.contains("the guest's kernel has no ") && done.err.contains(option), "{}", done.err);
    }
}

fn every_thread_makes_only_its_calls() {
    assert_text("confined", "0\n");
}
