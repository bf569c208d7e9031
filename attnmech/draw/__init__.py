"""Arrays with labels and units in, plotly figures or one offline page out; nothing here knows a model."""
