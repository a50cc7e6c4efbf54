//! Steps on the lab's simulated host: one boot, many commands, and a test for each looks at what its own did.

use std::borrow::Cow;
use std::collections::BTreeMap;
use std::fmt::Write;
use std::fs;
use std::path::{Path, PathBuf};
use std::thread;
use std::time::Duration;

use guest_images::cache::Cache;
use guest_images::{Arch, Progress, Release, Suite};
use tally_lab::{Core, Scenario, cross, default_host};

use crate::{payload, program, suite};

/// What one step did.
#[derive(Debug, Clone)]
pub struct Done {
    /// Its exit status.
    pub status: i32,
    /// Its standard output.
    pub out: Vec<u8>,
    /// Its standard error.
    pub err: String,
}

impl Done {
    /// Its standard output as text.
    pub fn text(&self) -> String {
        String::from_utf8_lossy(&self.out).into_owned()
    }
}

/// For shell scripts of the host, guests that are stopped while something is prepared which must miss nothing of what they do
/// later. `begin COMMAND...` starts one, the process `$tally`, and stops it as soon as it has a vCPU, whose thread is `$vcpu`;
/// `find_vcpu` finds that of one that goes on. `ended PROCESS` waits for a guest, which is to have written 0 to the debug exit.
pub const PAUSED_GUESTS: &str = "\
find_vcpu() {
    until comm=$(grep -ls '^vcpu0' /proc/$tally/task/*/comm) || ! kill -0 $tally; do sleep 0.001; done
    vcpu=${comm%/comm} vcpu=${vcpu##*/}
}
begin() {
    \"$@\" & tally=$!
    find_vcpu
    kill -STOP $tally
}
ended() {
    wait $1
    [ $? = 1 ]
}
";

/// A core for a test that runs the lab's own programs, until it ends.
pub fn core() -> Core {
    const LIMIT: Duration = Duration::from_mins(5);
    Core::wait_for(thread::current().name().unwrap_or("a test"), LIMIT)
}

/// Commands by name, and what the host is like that they run on.
pub struct Steps {
    name: &'static str,
    arch: Arch,
    changes: Vec<Change>,
    guest_programs: Vec<(String, Cow<'static, [u8]>)>,
    script: String,
    names: Vec<String>,
}

type Change = Box<dyn FnOnce(Scenario) -> Scenario>;

/// What all steps did, by name.
pub struct Results(BTreeMap<String, Done>);

/// The folder that a kernel of the distribution is in, with the modules that drive Tally's devices, as its packages install
/// them: `NAME/boot/vmlinuz` and `NAME/lib/modules`. It takes a step to unpack it.
pub fn installed(steps: Steps, name: &'static str, suite: Suite) -> Steps {
    let release = Release { suite, arch: steps.arch };
    let cache = Cache::open().expect("there is a cache");
    let kernel = guest_images::kernel(&cache, release, &mut Progress::stderr("lab"))
        .unwrap_or_else(|error| panic!("{error}"));
    let modules = guest_images::modules::archive(&kernel.modules).unwrap_or_else(|error| panic!("{error}"));
    let archive = format!("{name}.modules");
    let unpack = format!(
        "mkdir -p {name}/boot && mv {name}.image {name}/boot/vmlinuz && cd {name} && cpio -i <../{archive}"
    );
    steps
        .on(move |scenario| scenario.file(kernel.image, &format!("{name}.image")).program(modules, &archive))
        .step(&format!("install-{name}"), &unpack)
}

impl Results {
    /// What that step did.
    pub fn of(&self, name: &str) -> &Done {
        self.0.get(name).unwrap_or_else(|| panic!("there is no step `{name}`"))
    }
}

impl Steps {
    /// A group of this name, on a host that has the program under test as `tally`, the typist as `typist`, our bare-metal
    /// program as `payload`, and the default guest.
    pub fn new(name: &'static str) -> Self {
        Self::of(Arch::X86_64, name)
    }

    /// A group of this name, on a RISC-V host that has the program under test and the default guest.
    pub fn on_riscv(name: &'static str) -> Self {
        Self::of(Arch::Riscv64, name)
    }

    fn of(arch: Arch, name: &'static str) -> Self {
        let (changes, guest_programs, names) = (Vec::new(), Vec::new(), Vec::new());
        Self { name, arch, changes, guest_programs, script: String::new(), names }
    }

    /// Puts a program into the guest.
    #[must_use]
    pub fn in_guest(mut self, name: &str, program: impl Into<Cow<'static, [u8]>>) -> Self {
        self.guest_programs.push((name.to_owned(), program.into()));
        self
    }

    /// Changes the host.
    #[must_use]
    pub fn on(mut self, change: impl FnOnce(Scenario) -> Scenario + 'static) -> Self {
        self.changes.push(Box::new(change));
        self
    }

    /// Puts a file where the steps run.
    #[must_use]
    pub fn file(self, path: impl Into<PathBuf>, name: &'static str) -> Self {
        let path = path.into();
        self.on(move |scenario| scenario.file(path, name))
    }

    /// Adds a step: shell commands, in a shell of their own.
    #[must_use]
    pub fn step(mut self, name: &str, commands: &str) -> Self {
        writeln!(
            self.script,
            "echo 'step {name}' >&2\n({commands}) >$OUT/{name}.out 2>$OUT/{name}.err\necho $? >$OUT/{name}.status"
        )
        .expect("writing to a string cannot fail");
        self.names.push(name.to_owned());
        self
    }

    /// Adds a step: a guest of our bare-metal program, which does what these words say.
    #[must_use]
    pub fn bare_metal(self, name: &str, options: &str, words: &str) -> Self {
        self.step(name, &format!("./tally run --kernel payload {options} --append '{words}'"))
    }

    /// Adds what only tests of the second tier look at, if those run.
    #[must_use]
    pub fn breadth(self, add: impl FnOnce(Self) -> Self) -> Self {
        if suite::has_breadth() { add(self) } else { self }
    }

    /// Has this host be among the first that get a core, because it takes longer than most.
    #[must_use]
    pub fn long(self) -> Self {
        self.on(|scenario| scenario.limit(Duration::from_mins(40)))
    }

    /// Boots the host as soon as it gets a core, and takes the steps.
    pub fn run(self) -> Results {
        let guest_programs: Vec<_> =
            self.guest_programs.iter().map(|(name, program)| (name.as_str(), program.as_ref())).collect();
        let folder = tempfile::tempdir().expect("temporary folders can be made");
        let mut progress = Progress::stderr("lab");
        let scenario = Scenario::new(self.script).named(self.name).host(default_host(self.arch));
        let scenario = match self.arch {
            Arch::X86_64 => scenario
                .file(program("tally"), "tally")
                .file(program("typist"), "typist")
                .file(payload(), "payload"),
            Arch::Riscv64 => {
                let tally = cross::program("tally", &mut progress);
                scenario.file(tally.unwrap_or_else(|error| panic!("{error}")), "tally")
            }
        };
        let scenario = scenario
            .limit(Duration::from_mins(20))
            .keep_output_in(folder.path())
            .guest_with(Release::of(self.arch), &guest_programs, &mut progress)
            .unwrap_or_else(|error| panic!("the default guest: {error}"));
        let scenario = self.changes.into_iter().fold(scenario, |scenario, change| change(scenario));
        let outcome = scenario.run(&mut Progress::stderr("lab")).unwrap_or_else(|error| panic!("{error}"));
        assert_eq!(outcome.status, 0, "{}", String::from_utf8_lossy(&outcome.stderr));
        Results(self.names.iter().map(|name| (name.clone(), done(folder.path(), name))).collect())
    }
}

fn done(folder: &Path, name: &str) -> Done {
    let read = |suffix: &str| {
        let path = folder.join(format!("{name}.{suffix}"));
        fs::read(&path).unwrap_or_else(|error| panic!("{}: {error}", path.display()))
    };
    let text = |suffix: &str| String::from_utf8_lossy(&read(suffix)).into_owned();
    Done {
        status: text("status").trim().parse().expect("a status is a number"),
        out: read("out"),
        err: text("err"),
    }
}
