(number) => {
    let text = "";
    for (let at = 0; at < pixels[number].length; at += 32768) {
        text += String.fromCharCode(...pixels[number].subarray(at, at + 32768));
    }
    return btoa(text);
}
