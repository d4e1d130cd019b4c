// Search in a site that was opened from disk. Browsers start no worker on a file:// page,
// so the worker's script runs in a hidden frame and exchanges messages with the page.
// The name keeps the plugin "offline" from loading such a script from the network.
if (location.protocol === "file:") {
  window.Worker = class extends EventTarget {
    constructor(url) {
      super();
      this.frame = document.createElement("iframe");
      this.frame.hidden = true;
      document.body.append(this.frame);
      const inside = this.frame.contentWindow;
      this.ready = new Promise((resolve) => {
        const script = inside.document.createElement("script");
        script.src = new URL(url, location.href).href;
        script.onload = resolve;
        inside.postMessage = (data) => this.dispatchEvent(new MessageEvent("message", { data }));
        inside.document.head.append(script);
      });
    }

    postMessage(data) {
      const inside = this.frame.contentWindow;
      this.ready.then(() => inside.dispatchEvent(new inside.MessageEvent("message", { data })));
    }

    terminate() {
      this.frame.remove();
    }
  };
}
