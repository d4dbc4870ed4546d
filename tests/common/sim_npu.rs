//! A simulated Ascend card. Only one test at a time uses it, because the simulator has global state.

#![allow(dead_code)] // each test binary uses only a part

use std::path::PathBuf;
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, LazyLock};

use ascend_llm::device::ascend::{AscendDevice, AscendOpenError, AscendOptions};
use ascend_sim::Simulator;
use parking_lot::{Mutex, MutexGuard};

static SIMULATOR: LazyLock<Simulator> =
    LazyLock::new(|| Simulator::beside_this_binary().expect("cargo builds the simulator next to its tests"));
static TURN: Mutex<()> = Mutex::new(());

/// The simulator, reserved for one test until the value is dropped.
pub struct Npu {
    pub sim: &'static Simulator,
    /// Path of the library, if it is a copy.
    copy: Option<PathBuf>,
    _turn: MutexGuard<'static, ()>,
}

impl Drop for Npu {
    fn drop(&mut self) {
        if let Some(file) = &self.copy {
            // The library stays loaded. If the file cannot be removed, it remains in a folder for temporary files.
            let _ = std::fs::remove_file(file);
        }
    }
}

impl Npu {
    /// Returns the simulator in its initial state.
    pub fn new() -> Self {
        let turn = TURN.lock();
        SIMULATOR.reset();
        Self { sim: &SIMULATOR, copy: None, _turn: turn }
    }

    /// Returns the simulator with the given settings.
    pub fn with(settings: &[(&str, i64)]) -> Self {
        let npu = Self::new();
        for (name, value) in settings {
            npu.sim.set(name, *value);
        }
        npu
    }

    /// Returns a simulator whose library lacks some functions, like an older version.
    ///
    /// Each call loads another copy of the library, which is never unloaded.
    pub fn lacking(symbols: &[&str]) -> Self {
        static COPIES: AtomicU32 = AtomicU32::new(0);
        let turn = TURN.lock();
        let copy = COPIES.fetch_add(1, Ordering::Relaxed);
        let name = format!("libascend_lacking_{}_{copy}.so", std::process::id());
        let file = std::path::Path::new(env!("CARGO_TARGET_TMPDIR")).join(name);
        SIMULATOR.without(symbols, &file).expect("the copy is written");
        let sim = Box::leak(Box::new(Simulator::open(&file).expect("the copy loads")));
        Self { sim, copy: Some(file), _turn: turn }
    }

    pub fn try_device(&self, change: impl FnOnce(&mut AscendOptions)) -> Result<Arc<AscendDevice>, AscendOpenError> {
        let mut options = AscendOptions::default();
        options.library = Some(self.sim.path().to_owned());
        change(&mut options);
        AscendDevice::open(options)
    }

    pub fn device(&self) -> Arc<AscendDevice> {
        self.try_device(|_| ()).expect("the simulated card opens")
    }

    /// Returns the result of opening a device with a copy of the library that lacks some functions.
    pub fn sim_without(&self, symbols: &[&str]) -> Result<Arc<AscendDevice>, AscendOpenError> {
        let file = self.library_without(symbols);
        self.try_device(|options| options.library = Some(file))
    }

    /// Returns the path of a copy of the library that lacks some functions.
    pub fn library_without(&self, symbols: &[&str]) -> PathBuf {
        let file =
            std::path::Path::new(env!("CARGO_TARGET_TMPDIR")).join(format!("libascend_without_{}.so", symbols[0]));
        // A copy that is already loaded must not change: the new copy replaces the file of that name.
        let fresh = file.with_extension("fresh");
        self.sim.without(symbols, &fresh).expect("the copy is written");
        std::fs::rename(&fresh, &file).expect("the copy is renamed");
        file
    }

    /// Opens the first `count` cards, with one rank of a model on each.
    pub fn cards(&self, count: u32) -> Arc<AscendDevice> {
        self.try_device(|options| options.cards = (0..count).collect()).expect("the simulated cards open")
    }

    /// Opens a device without graph capture, which queues operation by operation.
    pub fn eager(&self) -> Arc<AscendDevice> {
        self.try_device(|options| options.capture = false).expect("the simulated card opens")
    }

    /// Checks that no object is left on the card, and that the simulator reports no misuse.
    #[track_caller]
    pub fn assert_clean(&self) {
        assert_eq!(self.sim.complaints(), [""; 0], "the simulator reports misuse");
        for sort in
            ["device_blocks", "pinned_blocks", "streams", "events", "contexts", "graphs", "executors", "descriptors"]
        {
            assert_eq!(self.sim.live(sort), 0, "objects of kind {sort} are left on the card");
        }
    }
}
