//! A whole quantization with a custom observer and cancel token: stopped after the first block, and then resumed.

use std::sync::atomic::{AtomicU64, Ordering};

use quant_core::calibrate::Corpus;
use quant_core::run::{Host, Nothing, QuantizeRequest, RecipeSettings, Text, quantize};
use quant_core::{CancelToken, Error, Event, Observer, Result};

/// Counts blocks, and requests a stop after `stop` of them.
struct Counter<'a> {
    blocks: AtomicU64,
    stop: u64,
    cancel: &'a CancelToken,
}

impl Observer for Counter<'_> {
    fn event(&self, event: &Event) {
        if let Event::UnitDone { .. } = event
            && self.blocks.fetch_add(1, Ordering::Relaxed) + 1 == self.stop
        {
            self.cancel.cancel();
        }
    }
}

fn main() -> Result<()> {
    let [model, out] = [1, 2].map(|i| std::env::args_os().nth(i).expect("drive MODEL OUT"));
    let text = "The mill stood by the river, and nobody knew who owned it. ".repeat(200);
    let settings = RecipeSettings { samples: Some(2), seq_len: Some(64), ..RecipeSettings::default() };
    let calibration = Some(Text::Given(Corpus::Texts(vec![text]), "mine".into()));
    let mut request = QuantizeRequest { settings, calibration, ..QuantizeRequest::new(model, out) };

    let cancel = CancelToken::new();
    let counter = Counter { blocks: AtomicU64::new(0), stop: 1, cancel: &cancel };
    match quantize(&request, &Host::new(&counter, &cancel, &Nothing)) {
        Err(Error::Interrupted) => {}
        Err(error) => return Err(error),
        Ok(_) => panic!("the run was not stopped"),
    }

    cancel.reset();
    request.resume = true;
    let counter = Counter { stop: u64::MAX, blocks: AtomicU64::new(0), cancel: &cancel };
    quantize(&request, &Host::new(&counter, &cancel, &Nothing))?;
    println!("{} units", counter.blocks.load(Ordering::Relaxed));
    Ok(())
}
