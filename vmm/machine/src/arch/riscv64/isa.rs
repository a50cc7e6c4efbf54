//! The ISA extensions of a guest's processor, by their names.

use kvm_ioctls::VcpuFd;

use super::register::Register;

/// Sscofpmf: the counters' overflow interrupt, and filtering of the privilege modes in which they count.
pub const COUNTER_OVERFLOWS: &str = "sscofpmf";

/// Names of extensions, in the order of KVM's numbers (`enum KVM_RISCV_ISA_EXT_ID`).
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
/// Single-letter extensions, in the order in which an ISA string lists them.
const LETTERS: &str = "imafdcvh";

/// Returns the extensions that a vCPU has.
pub fn extensions(fd: &VcpuFd) -> Vec<&'static str> {
    let has = |number| Register::extension(number).get(fd) == Ok(1);
    (0..).zip(NAMES).filter(|(number, _)| has(*number)).map(|(_, name)| name).collect()
}

/// Returns the name of the extension with this number of KVM's.
pub fn name(number: u32) -> Option<&'static str> {
    NAMES.get(usize::try_from(number).ok()?).copied()
}

/// Returns the ISA string of a processor with these extensions.
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
    fn an_isa_string_lists_letters_in_order_and_then_names() {
        assert_eq!(named(&["a", "c", "d", "f", "i", "m", "sstc", "zba"]), "rv64imafdc_sstc_zba");
    }
}
