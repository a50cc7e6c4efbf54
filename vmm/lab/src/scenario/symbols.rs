//! Symbols of the simulated host's kernel, and of programs there.
//!
//! Debian ships no `System.map`. But the addresses are the same at every boot, so they can be read in another boot,
//! which takes seconds. They are needed only if a host hangs and does not answer.

use std::fs;
use std::ops::Range;

use elf::ElfBytes;
use elf::abi::STT_FUNC;
use elf::endian::NativeEndian;
use guest_images::cache::{Cache, Key};
use guest_images::{Progress, Release};

use crate::error::{Error, Result};
use crate::simulator::board::Processor;
use crate::simulator::image;

/// The kernel's functions, sorted by address.
pub struct Symbols(Vec<Function>);

/// A function of the kernel.
#[derive(Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Function {
    /// Its first address.
    pub start: u64,
    pub name: String,
    /// The module that it is from, if any.
    pub module: Option<String>,
}

impl Symbols {
    /// Returns the symbols of the host with the kernel of a release. If they are not in the cache, `read` reads the
    /// host's `/proc/kallsyms`.
    pub fn of_host(
        release: Release,
        processor: Processor,
        progress: &mut Progress,
        read: impl FnOnce(&mut Progress) -> Result<Vec<u8>>,
    ) -> Result<Self> {
        let cache = Cache::open()?;
        let image = image::build(&cache, release, processor, progress)?;
        let initrd = image.initrd.as_os_str().as_encoded_bytes();
        let key = Key::new(&format!("lab-symbols-{}", release.label()))
            .with(initrd)
            .with(image.kernel.as_os_str().as_encoded_bytes());
        let entry = cache.entry(&key, progress, |progress, entry| {
            let path = entry.join("kallsyms");
            fs::write(&path, read(progress)?).map_err(Error::file("write", path))
        })?;
        let path = entry.join("kallsyms");
        Ok(Self::parse(&fs::read_to_string(&path).map_err(Error::file("read", path))?))
    }

    pub(crate) fn parse(text: &str) -> Self {
        let mut symbols: Vec<Function> = text
            .lines()
            .filter_map(|line| {
                let mut words = line.split_whitespace();
                let start = u64::from_str_radix(words.next()?, 16).ok()?;
                let is_code = matches!(words.next()?, "t" | "T" | "w" | "W");
                let name = is_code.then(|| words.next())??.to_owned();
                let module = words.next().map(|module| module.trim_matches(['[', ']']).to_owned());
                Some(Function { start, name, module })
            })
            .collect();
        symbols.sort();
        Self(symbols)
    }

    /// Returns the functions of a program, at the addresses that its file says. There are none if it was stripped.
    pub fn of_program(elf: &[u8]) -> Self {
        let tables = ElfBytes::<NativeEndian>::minimal_parse(elf).and_then(|file| file.symbol_table());
        let Ok(Some((table, names))) = tables else { return Self(Vec::new()) };
        let functions = table.iter().filter(|symbol| symbol.st_symtype() == STT_FUNC);
        let mut functions: Vec<Function> = functions
            .filter_map(|symbol| {
                let name = names.get(symbol.st_name as usize).ok()?;
                let name = format!("{:#}", rustc_demangle::demangle(name));
                Some(Function { start: symbol.st_value, name, module: None })
            })
            .collect();
        functions.sort();
        Self(functions)
    }

    pub fn function(&self, address: u64) -> Option<&Function> {
        let after = self.0.partition_point(|function| function.start <= address);
        self.0.get(after.checked_sub(1)?)
    }

    /// Returns the address of the function with a name.
    pub fn address(&self, name: &str) -> Option<u64> {
        self.0.iter().find(|function| function.name == name).map(|function| function.start)
    }

    /// Returns the addresses of the function with a name.
    pub fn range(&self, name: &str) -> Option<Range<u64>> {
        let start = self.address(name)?;
        let after = self.0.partition_point(|function| function.start <= start);
        Some(start..self.0.get(after)?.start)
    }

    /// Returns the name of the function at an address, and the offset in that function.
    pub fn name(&self, address: u64) -> Option<String> {
        let Function { start, name, .. } = self.function(address)?;
        Some(format!("{name}+{:#x}", address - start))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_address_is_named_after_the_function_before_it() {
        let symbols = Symbols::parse(
            "ffffffff81000010 T second\nffffffff81000000 t first\nffffffff81000018 D data\nffffffffc0000000 t third\t[kvm]\n",
        );
        assert_eq!(symbols.name(0xffff_ffff_8100_0018).as_deref(), Some("second+0x8"));
        assert_eq!(symbols.name(0xffff_ffff_8100_0000).as_deref(), Some("first+0x0"));
        assert_eq!(symbols.name(0xffff_ffff_c000_0004).as_deref(), Some("third+0x4"));
        assert_eq!(symbols.name(0x1000), None);
        let third = symbols.function(0xffff_ffff_c000_0004).expect("it is the last");
        assert_eq!(third.module.as_deref(), Some("kvm"));
        assert_eq!(symbols.address("third"), Some(third.start));
        assert_eq!(symbols.range("first"), Some(0xffff_ffff_8100_0000..0xffff_ffff_8100_0010));
    }
}
