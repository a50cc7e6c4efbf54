//! Which extensions of the instruction set a guest's processor has, by their names.

use kvm_ioctls::VcpuFd;

use super::register::Register;

/// Counters' overflow interrupt, and the modes in which they count.
pub const COUNTER_OVERFLOWS: &str = "sscofpmf";

/// In the order of KVM's numbers (`enum KVM_RISCV_ISA_EXT_ID`).
const NAMES: [&str; 71] = [
    "a",
    "c",
    "d",
    "f",
    "h",
    "i",
    "m",
    "svpbmt",
    "sstc",
    "svinval",
    "zihintpause",
    "zicbom",
    "zicboz",
    "zbb",
    "ssaia",
    "v",
    "svnapot",
    "zba",
    "zbs",
    "zicntr",
    "zicsr",
    "zifencei",
    "zihpm",
    "smstateen",
    "zicond",
    "zbc",
    "zbkb",
    "zbkc",
    "zbkx",
    "zknd",
    "zkne",
    "zknh",
    "zkr",
    "zksed",
    "zksh",
    "zkt",
    "zvbb",
    "zvbc",
    "zvkb",
    "zvkg",
    "zvkned",
    "zvknha",
    "zvknhb",
    "zvksed",
    "zvksh",
    "zvkt",
    "zfh",
    "zfhmin",
    "zihintntl",
    "zvfh",
    "zvfhmin",
    "zfa",
    "ztso",
    "zacas",
    "sscofpmf",
    "zimop",
    "zca",
    "zcb",
    "zcd",
    "zcf",
    "zcmop",
    "zawrs",
    "smnpm",
    "ssnpm",
    "svade",
    "svadu",
    "svvptc",
    "zabha",
    "ziccrse",
    "zaamo",
    "zalrsc",
];
/// The order in which those of one letter are written.
const LETTERS: &str = "imafdcvh";

/// Those that a vCPU has.
pub fn extensions(fd: &VcpuFd) -> Vec<&'static str> {
    let has = |number| Register::extension(number).get(fd) == Ok(1);
    (0..).zip(NAMES).filter(|(number, _)| has(*number)).map(|(_, name)| name).collect()
}

/// What a kernel calls a processor with these.
pub fn named(extensions: &[&str]) -> String {
    let letters: String =
        LETTERS.chars().filter(|letter| extensions.contains(&&*letter.to_string())).collect();
    let words = extensions.iter().filter(|name| name.len() > 1).map(|name| format!("_{name}"));
    format!("rv64{letters}{}", words.collect::<String>())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn letters_come_in_their_order_and_names_behind_them() {
        assert_eq!(named(&["a", "c", "d", "f", "i", "m", "sstc", "zba"]), "rv64imafdc_sstc_zba");
    }
}
